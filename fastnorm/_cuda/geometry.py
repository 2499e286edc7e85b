"""Which kernel takes rows of a length, and with how many threads: functions of the row length, the dtype and the
device alone, so that a row has the same bits in any batch; and the same for channels of a shape. Nothing here needs
CuPy.

A pack is 16 bytes of a row. docs/gpu.md has the table of paths.
"""
from functools import cache, lru_cache
from typing import NamedTuple

PACK_BYTES = 16
# packs.cuh, sums.cuh: what a team of more than one warp needs to add up.
SLOTS_BYTES = 2 * 32 * 48
# Threads of a block, and packs of a thread, where rows come in slices.
SLICE_THREADS, SLICE_PACKS = 256, 4
# Bytes of a channel next to each other from which on it comes in slices; rows of columns that a thread has at a time.
SHORTEST_RUN, COLUMN_ROWS = 32, 8


class Plan(NamedTuple):
    """How rows of one length are computed."""

    source: str             # row_forward, row_backward; slice_forward, slice_backward
    macros: tuple           # of the source, as pairs
    team: int = SLICE_THREADS       # threads of a row
    teams: int = 1          # rows of a block at a time
    shared_memory: int = 0  # of a block, in bytes

    @property
    def threads(self):
        """Of a block."""
        return self.team * self.teams


def packs_of(n_cols, item_size):
    return -(-n_cols * item_size // PACK_BYTES)


def _warps(n):
    """n rounded up to whole warps."""
    return -(-n // 32) * 32


def _lanes(n):
    """n rounded up to a power of two."""
    return 1 << (n - 1).bit_length()


def _slices(source):
    return Plan(source, (("packs", SLICE_PACKS), ("threads", SLICE_THREADS)), shared_memory=SLOTS_BYTES)


@cache
def forward_plan(n_cols, item_size, shared_memory):
    """shared_memory: bytes that a block of the device may have."""
    packs = packs_of(n_cols, item_size)
    if packs <= 64:
        team = _lanes(-(-packs // 2))
        return Plan("row_forward", (("packs", 2), ("threads", 128)), team, 128 // team)
    if packs <= 2048:
        team = _warps(-(-packs // 4))
        return Plan("row_forward", (("packs", 4), ("threads", 512)), team, 4 if team == 32 else 1,
                    SLOTS_BYTES if team > 32 else 0)
    whole_row = SLOTS_BYTES + packs * PACK_BYTES
    if whole_row <= shared_memory:
        return Plan("row_forward", (("packs", 0), ("threads", 512)), 512, 1, whole_row)
    return _slices("slice_forward")


@cache
def backward_plan(n_cols, item_size, centered, shared_memory):
    packs = packs_of(n_cols, item_size)
    n_sums, real_size = 2 if centered else 1, max(4, item_size)
    if packs <= 512 or (packs <= 1024 and item_size == 4):
        per_thread = 1 if packs <= 512 else 2
        team = _lanes(packs) if packs <= 32 else _warps(-(-packs // per_thread))
        teams = max(1, 256 // team)
        # Teams leave their sums to one another in doubles, or in two where that is the arithmetic type.
        merging = n_sums * n_cols * (8 if real_size == 4 else 16) if team * teams > max(32, team) else 0
        return Plan("row_backward", (("packs", per_thread), ("shared_sums", 0), ("threads", 512)), team, teams,
                    (teams * SLOTS_BYTES if team > 32 else 0) + merging)
    # A sum and its rest for each column. Twice as many columns of a 16-bit type find no room in registers.
    shared_sums = SLOTS_BYTES + packs * (PACK_BYTES // item_size) * real_size * 2 * n_sums
    if packs <= (2048 if item_size >= 4 else 1024) and shared_sums <= shared_memory:
        return Plan("row_backward", (("packs", 4), ("shared_sums", 1), ("threads", 256 if packs <= 1024 else 512)),
                    _warps(-(-packs // 4)), 1, shared_sums)
    return _slices("slice_backward")


def backward_blocks(plan, n_rows, multiprocessors, with_sums):
    """Blocks of row_backward: as many as run at the same time; each leaves a row of partial sums, so no more than are
    worth it."""
    most = multiprocessors * max(1, 512 // plan.threads)
    rows_each = 8 * plan.teams if with_sums else plan.teams
    return max(1, min(most if with_sums else 4 * most, -(-n_rows // rows_each)))


def slices_of(n_cols, item_size):
    """Slices of a row."""
    return -(-packs_of(n_cols, item_size) // (SLICE_THREADS * SLICE_PACKS))


def backward_chunks(n_rows, n_cols, item_size, multiprocessors):
    """(runs of columns of a block, rows of a chunk, chunks) of slice_backward_apply."""
    runs = -(-packs_of(n_cols, item_size) // SLICE_THREADS)
    chunks = max(1, min(-(-4 * multiprocessors // runs), -(-n_rows // 8)))
    rows = -(-n_rows // chunks)
    return runs, rows, -(-n_rows // rows)


class ChannelPlan(NamedTuple):
    """How the channels of one shape are computed. channels.cuh has the two ways."""

    way: str                # runs, columns
    blocks: int             # of the kernels that go over x
    parts: int              # of a channel
    across: int = 0         # packs of columns of a block beside each other
    rows_of_chunk: int = 0
    chunks: int = 0
    # Of the kernels for sums, in bytes.
    forward_memory: int = SLOTS_BYTES
    backward_memory: int = SLOTS_BYTES


@lru_cache(4096)
def channel_plan(outer, n_channels, inner, item_size):
    """From the shape alone: neither the device nor the alignment changes the bits."""
    if inner * item_size >= SHORTEST_RUN:
        slices = -(-outer * packs_of(inner, item_size) // (SLICE_THREADS * SLICE_PACKS))
        return ChannelPlan("runs", n_channels * slices, slices)
    packs, values = packs_of(n_channels * inner, item_size), PACK_BYTES // item_size
    # Beside each other as many as a line of memory has, and more where there are not enough rows for the others.
    across = min(32, _lanes(packs))
    while across < min(128, _lanes(packs)) and COLUMN_ROWS * (SLICE_THREADS // across) > outer:
        across *= 2
    # So many rows that the moments of a chunk are few bytes beside them, so few that there are blocks for everybody.
    beside = -(-packs // across)
    chunks = max(1, min(-(-1024 // beside), outer // 1024))
    step = COLUMN_ROWS * (SLICE_THREADS // across)
    rows = -(-outer // (chunks * step)) * step
    chunks = -(-outer // rows)
    columns, real_size, total_size = across * values, max(4, item_size), 8 if item_size < 8 else 16
    sums = SLICE_THREADS * values * total_size
    return ChannelPlan("columns", beside * chunks, inner * chunks, across, rows, chunks,
                       SLOTS_BYTES + columns * (real_size + 4) + 2 * sums, sums)


def settling_team(parts):
    """Threads of a channel where its parts are put together."""
    return min(32, _lanes(parts)) if parts <= 256 else SLICE_THREADS


def variants():
    """(source, macros) of all that the launchers can ask for, whatever the device."""
    found = set()
    # Around every length at which one of the plans changes, with shared memory and without.
    lengths = sorted({max(1, packs * 16 // size + more) for packs in (1, 32, 64, 128, 512, 1024, 2048, 4096, 16384)
                      for size in (2, 4, 8) for more in (0, 1)})
    for dtype, size in (("float16", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8)):
        for centered in (1, 0):
            for shared_memory in (48 << 10, 227 << 10):
                for n_cols in lengths:
                    for plan in (forward_plan(n_cols, size, shared_memory),
                                 backward_plan(n_cols, size, bool(centered), shared_memory)):
                        found.add((plan.source + ".cu", (("storage", dtype), ("centered", centered), *plan.macros)))
        for source in ("channel_forward.cu", "channel_backward.cu"):
            found.add((source, (("storage", dtype),)))
    for dtype in ("float32", "float64"):
        found.add(("finish_sums.cu", (("storage", dtype),)))
    found.add(("copy.cu", ()))
    return sorted(found)
