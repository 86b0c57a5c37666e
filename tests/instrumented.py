"""Classes and functions that tests import by name: for pickling, child processes, and `package.module:name` texts."""

from __future__ import annotations

from otel_forge import instrument


@instrument
class Counter:
    """Counts."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, number: int) -> int:
        self.value += number
        return self.value

    def put(self, queue: object) -> None:
        queue.put(self.add(1))  # type: ignore[attr-defined]


class Base:
    def greet(self, name: str) -> str:
        """Greets."""
        return f"hello {name}"


@instrument
class Child(Base):
    pass


@instrument
def double(number: int) -> int:
    return 2 * number


class Plain:
    def work(self, number: int) -> int:
        return number + 1

    def rest(self) -> None:
        return None

    class Inner:
        def work(self) -> str:
            return "inner"


def plain(number: int) -> int:
    return number + 2


def other(number: int) -> int:
    return number + 3
