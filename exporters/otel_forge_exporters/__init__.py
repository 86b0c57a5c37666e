"""The exporter process: from the Collector's partials to rows, and from rows to wandb runs and every other place."""
