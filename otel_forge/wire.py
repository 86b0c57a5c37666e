"""The wire format both sides share: attribute names, contributors, exact limbs, trace ids. It knows no OpenTelemetry library and does no I/O."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

# --- Resource attributes -------------------------------------------------------------------------------------------

RUN_ID = "forge.run_id"
ROLE = "forge.role"
REPLICA = "forge.replica"
RANK = "forge.rank"
WORLD_SIZE = "forge.world_size"
ATTEMPT = "forge.attempt"
NONCE = "forge.nonce"
"""One per process incarnation; two nonces for one member and attempt are an identity error."""
MODES = "forge.modes"
"""The logging modes the run's backends need, joined by commas and sorted: the Collector's filters match on it."""
ROUTE = "forge.route"
ROUTE_WINDOW = "window"
ROUTE_DIRECT = "direct"
"""Both route values have six letters, so that a stored payload changes its route by overwriting six bytes."""
PACKET = "forge.packet"
"""What a ResourceMetrics of ours holds: one of the PACKET_* values."""
PACKET_VALUES = "values"
PACKET_STREAM = "stream"
PACKET_HELLO = "hello"
PACKET_RUN_INFO = "run_info"
PACKET_LAST = "last"
PACKET_ID = "forge.packet_id"
"""`nonce/sequence`, unique per packet and kept by every resend: the unit id of what arrives unreduced."""
BATCH_ID = "forge.agg.batch_id"
"""Set by the Collector on a reduced payload; the unit id of what arrives reduced."""
CONTRIBUTE = "forge.contribute"
"""False on the per-rank packet of a copy whose values are kept out of the global row."""

# --- Point attributes ----------------------------------------------------------------------------------------------

STEP = "step"
POINT_ROLE = "role"
POINT_REPLICA = "replica"
POINT_ATTEMPT = "attempt"
OCCURRENCE = "occurrence"
PART = "part"
PARTS = "parts"
POINT_WORLD_SIZE = "world_size"
BLOCK = "block"
MEMBER = "member"
KEY = "forge.key"
REDUCTION = "forge.reduction"
LIMB = "limb"
SEQUENCE = "forge.sequence"
"""Stream points only: counts up by one per process, for dedupe and order."""

SERIES_ATTRIBUTES = (
    STEP, POINT_ROLE, POINT_REPLICA, POINT_ATTEMPT, OCCURRENCE, PART, PARTS, POINT_WORLD_SIZE, BLOCK, MEMBER, KEY, REDUCTION, LIMB,
)  # fmt: skip
"""What tells two series of one metric apart in the Collector. Its YAML is rendered from this list: an attribute that is not here is dropped there,
and the series that differ only by it are merged."""

BODY = "forge.body"
"""The JSON text of a hello, run_info or last packet, an attribute of its single `forge.control` Gauge point."""
CONTROL_METRIC = "forge.control"
CONTRIBUTORS_METRIC = "forge.contributors"
STEP_START_METRIC = "forge.step_start"
STEP_END_METRIC = "forge.step_end"
TRACE_STEP_METRIC = "forge.trace_step"
SLOWEST_METRIC = "forge.slowest"
"""MAX of step time in microseconds · 2^20 + rank."""
SLOWEST_PHASE_PREFIX = "forge.slowest/"
"""The same of one phase of the step: `forge.slowest/{prefix}/{phase}`."""
STEP_TIME_METRIC = "forge.step_time"
SCOPE = "otel_forge"

# --- Reductions on the wire: `<reduction>` or `<reduction>:<component>` ----------------------------------------------

NONFINITE = "nonfinite"
"""Component: a double Sum, how many values were NaN or infinite and kept out of the rest."""
WEIGHTED_SUM = "weighted_sum"
WEIGHT = "weight"
"""Components of a weighted mean: two double Sums."""
MOMENT_N = "n"
MOMENT_X = "x"
MOMENT_XX = "xx"
"""Components of std: int64 Sums, one point per non-zero limb."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.\-/]{0,199}\Z")
_NOT_NAME = re.compile(r"[^A-Za-z0-9_.\-/]")


def metric_name(key: str, component: str | None = None) -> str:
    """The OTel metric name for a key: the key itself where OTel allows it, else a cleaned name with a hash of the key.

    The hash keeps two keys from colliding after the cleaning.

    A component (`weight`, `x`, …) is appended after a dot, because one OTel name must not hold two kinds of data.
    """
    if not _NAME.match(key):
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
        key = f"k{_NOT_NAME.sub('_', key)[:180]}.{digest}"
    return f"{key}.{component}" if component else key


# --- Contributors ----------------------------------------------------------------------------------------------------

RANKS_PER_BLOCK = 12
_COUNT_SHIFT = 48
_DIGITS_MASK = (1 << _COUNT_SHIFT) - 1


def contributors_value(rank: int) -> tuple[int, int]:
    """(block, value) that says "this rank, once": 16^(rank mod 12) + 2^48."""
    block, digit = divmod(rank, RANKS_PER_BLOCK)
    return block, (1 << (4 * digit)) + (1 << _COUNT_SHIFT)


OPEN_WORLD_VALUE = 1 + (1 << _COUNT_SHIFT)


def decode_contributors(values: Mapping[int, int]) -> dict[int, int] | None:
    """Rank → how often it is in the partial, from the summed value of each block; None when a carry or foreign value spoiled the digits."""
    counts: dict[int, int] = {}
    for block, value in values.items():
        if value <= 0 or block < 0:
            return None
        digits = value & _DIGITS_MASK
        total = 0
        for position in range(RANKS_PER_BLOCK):
            digit = (digits >> (4 * position)) & 15
            if digit:
                counts[block * RANKS_PER_BLOCK + position] = digit
                total += digit
        if total != value >> _COUNT_SHIFT:
            return None
    return counts


# --- Exact integers for STD --------------------------------------------------------------------------------------------

LIMB_BITS = 32
X_SHIFT = 1088
"""Σx travels as the integer Σx·2^1088: a double is a multiple of 2^-1074, and 1088 is the next multiple of 32."""
XX_SHIFT = 2176
MAX_LIMB = 72
"""The square of the largest double, times 2^40 values, ends below limb 66."""
_LIMB_MASK = (1 << LIMB_BITS) - 1


def to_limbs(value: int, shift: int) -> list[tuple[int, int]]:
    """(limb index, signed limb) of the non-zero limbs of an integer in units of 2^-shift; limb i weighs 2^(32·i). Empty for zero."""
    sign = -1 if value < 0 else 1
    rest = abs(value)
    index = -(shift // LIMB_BITS)
    if rest:  # skip the zero limbs below at once: a usual double has a thousand zero bits there
        skip = ((rest & -rest).bit_length() - 1) // LIMB_BITS
        rest >>= skip * LIMB_BITS
        index += skip
    limbs = []
    while rest:
        limb = rest & _LIMB_MASK
        if limb:
            limbs.append((index, sign * limb))
        rest >>= LIMB_BITS
        index += 1
    return limbs


def from_limbs(limbs: Iterable[tuple[int, int]], shift: int) -> int:
    """The inverse of `to_limbs`, also for limbs that were added up over ranks."""
    low = -(shift // LIMB_BITS)
    total = 0
    for index, limb in limbs:
        if not low <= index <= MAX_LIMB:
            raise ValueError(f"limb index {index} is not between {low} and {MAX_LIMB}")
        total += limb << ((index - low) * LIMB_BITS)
    return total


# --- Trace ids -----------------------------------------------------------------------------------------------------------


def trace_id(run_id: str, attempt: int, step: int) -> bytes:
    """The 16-byte trace id of one step, the same on every rank without a message."""
    return hashlib.blake2b(f"trace\0{run_id}\0{attempt}\0{step}".encode(), digest_size=16).digest()


def root_span_id(run_id: str, attempt: int, step: int) -> bytes:
    """The 8-byte id of a step's root span, which the exporter writes and every rank's outermost span names as its parent."""
    return hashlib.blake2b(f"root\0{run_id}\0{attempt}\0{step}".encode(), digest_size=8).digest()


def modes_value(modes: Iterable[str]) -> str:
    """The `forge.modes` attribute for a set of modes."""
    return ",".join(sorted(set(modes)))
