"""`python -m otel_forge.cli`."""

from otel_forge.cli import main

main()
