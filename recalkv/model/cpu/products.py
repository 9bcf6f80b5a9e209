"""Matrix products of float32 in compiled loops, of arrays and of what stands somewhere in memory."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from recalkv.model.cpu.loops import FEATURES, LANES, VECTOR, compiled, fetch, nested

__all__ = ["columns_at", "multiply", "product_at", "requests", "transpose", "turned_at", "write_columns"]

_VECTORS = 4 if "+avx512f" in FEATURES else 2
"""Vectors of columns in a block: with six rows, all sums still fit the registers."""

_ROWS = 6
"""Rows of a block, at most; four or more keep both multipliers of a core busy while sums wait for each other."""

_BLOCK = 64
"""Rows of the right matrix that are gone over for one block of columns: within the first cache."""

_SLOTS = 4
"""Slots whose scores are taken at once: their sums are gathered in one vector."""

_INT32, _INT64, _NUMBER = ir.IntType(32), ir.IntType(64), ir.FloatType()
_NUMBERS, _LANES = ir.VectorType(_NUMBER, VECTOR), ir.VectorType(_INT32, VECTOR)
_WORDS = ir.VectorType(_INT32, LANES)


def _place(builder: Any, address: Any, kind: Any, row: Any, width: Any, column: Any) -> Any:
    """Pointer to a number of float32 rows that are so many bytes apart."""
    row, column = (ir.Constant(_INT64, each) if isinstance(each, int) else each for each in (row, column))
    offset = builder.add(builder.mul(row, width), builder.mul(column, ir.Constant(_INT64, 4)))
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def _first_lanes(builder: Any, count: Any) -> Any:
    """Which lanes of a vector are the first ``count``."""
    many = builder.insert_element(ir.Constant(_LANES, ir.Undefined), builder.trunc(count, _INT32), _INT32(0))
    many = builder.shuffle_vector(many, many, ir.Constant(_LANES, None))
    return builder.icmp_signed("<", ir.Constant(_LANES, list(range(VECTOR))), many)


def _masked(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [each.type for each in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.{name}.v{VECTOR}f32.p0")
    return builder.call(function, arguments)


def _load(builder: Any, pointer: Any, lanes: Any = None) -> Any:
    """A vector from memory, of which lanes beyond these are not touched and zero."""
    if lanes is None:
        return builder.load(pointer, align=4)
    return _masked(builder, "load", _NUMBERS, pointer, _INT32(4), lanes, ir.Constant(_NUMBERS, None))


def _store(builder: Any, numbers: Any, pointer: Any, lanes: Any = None) -> None:
    if lanes is None:
        builder.store(numbers, pointer, align=4)
    else:
        _masked(builder, "store", ir.VoidType(), numbers, pointer, _INT32(4), lanes)


def _add_product(builder: Any, total: Any, left: Any, right: Any) -> None:
    product = builder.fmul(left, right, flags=("contract",))
    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)


def _block(rows: int, vectors: int) -> Any:
    """Add so many rows times so many vectors of columns, whose sums stay in registers; by addresses and bytes a row.

    Without vectors, it is columns that fill a part of one: the last argument says how many.
    """

    @intrinsic
    def block(
        context: Any,
        left: Any,
        left_row: Any,
        right: Any,
        right_row: Any,
        result: Any,
        result_row: Any,
        inner: Any,
        columns: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            left, left_row, right, right_row, result, result_row, inner, columns = arguments
            lanes = None if vectors else _first_lanes(builder, columns)
            places = {
                (row, vector): _place(builder, result, _NUMBERS, row, result_row, VECTOR * vector)
                for row in range(rows)
                for vector in range(max(1, vectors))
            }
            sums = {
                each: cgutils.alloca_once_value(builder, _load(builder, there, lanes)) for each, there in places.items()
            }
            with cgutils.for_range(builder, inner) as loop:
                own = [
                    _load(builder, _place(builder, right, _NUMBERS, loop.index, right_row, VECTOR * vector), lanes)
                    for vector in range(max(1, vectors))
                ]
                for row in range(rows):
                    one = builder.load(_place(builder, left, _NUMBER, row, left_row, loop.index))
                    one = builder.insert_element(ir.Constant(_NUMBERS, ir.Undefined), one, _INT32(0))
                    one = builder.shuffle_vector(one, one, ir.Constant(_LANES, None))
                    for vector, numbers in enumerate(own):
                        _add_product(builder, sums[row, vector], one, numbers)
            for each, there in places.items():
                _store(builder, builder.load(sums[each]), there, lanes)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return block


def _by_rows(block: Callable[[int], Any]) -> Any:
    """A function of a number of rows, up to :data:`_ROWS`, and of the arguments of one block."""
    _1, _2, _3, _4, _5, _6 = (block(rows) for rows in range(1, _ROWS + 1))

    @nested
    def by_rows(rows, left, left_row, right, right_row, result, result_row, inner, columns):
        if rows == 1:
            _1(left, left_row, right, right_row, result, result_row, inner, columns)
        elif rows == 2:
            _2(left, left_row, right, right_row, result, result_row, inner, columns)
        elif rows == 3:
            _3(left, left_row, right, right_row, result, result_row, inner, columns)
        elif rows == 4:
            _4(left, left_row, right, right_row, result, result_row, inner, columns)
        elif rows == 5:
            _5(left, left_row, right, right_row, result, result_row, inner, columns)
        else:
            _6(left, left_row, right, right_row, result, result_row, inner, columns)

    return by_rows


_several = _by_rows(lambda rows: _block(rows, _VECTORS))
_one = _by_rows(lambda rows: _block(rows, 1))
_part = _by_rows(lambda rows: _block(rows, 0))


@nested
def requests(rows, inner, columns):
    """How often :func:`product_at` asks for memory ahead."""
    width = _VECTORS * VECTOR
    return (rows + _ROWS - 1) // _ROWS * ((inner + _BLOCK - 1) // _BLOCK) * ((columns + width - 1) // width)


@compiled
def product_at(rows, inner, columns, left, left_row, right, right_row, result, result_row, ahead):
    """Add the product of float32 (rows, inner) and (inner, columns) to (rows, columns); by addresses and bytes a row.

    On the way memory is asked for that is to be read next (:func:`recalkv.model.cpu.loops.fetch`).
    """
    blocks = (rows + _ROWS - 1) // _ROWS
    for start in range(0, inner, _BLOCK):
        count, column = min(inner - start, _BLOCK), 0
        while column < columns:
            at, here = right + start * right_row + 4 * column, columns - column
            for number in range(blocks):
                fetch(ahead)
                row = rows * number // blocks
                many = rows * (number + 1) // blocks - row
                own, out = left + row * left_row + 4 * start, result + row * result_row + 4 * column
                if here >= _VECTORS * VECTOR:
                    _several(many, own, left_row, at, right_row, out, result_row, count, here)
                elif here >= VECTOR:
                    _one(many, own, left_row, at, right_row, out, result_row, count, here)
                else:
                    _part(many, own, left_row, at, right_row, out, result_row, count, here)
            column += _VECTORS * VECTOR if here >= _VECTORS * VECTOR else VECTOR


@compiled
def multiply(left, right, result, ahead):
    """Add the product of (m, k) and (k, n) to (m, n), float32, rows contiguous; ``ahead`` as above."""
    product_at(
        left.shape[0], left.shape[1], result.shape[1], left.ctypes.data, left.strides[0], right.ctypes.data,
        right.strides[0], result.ctypes.data, result.strides[0], ahead,
    )  # fmt: skip


def _gathered(builder: Any, vectors: list[Any]) -> Any:
    """Sums of :data:`_SLOTS` vectors, as a vector of so many numbers."""

    def chosen(first: Any, second: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes))

    def folded(first: Any, second: Any, size: int) -> Any:
        """Of each four lanes, half the sums of the first vector's and half of the second's, in turns of this size."""
        halves = []
        for half in (0, 2):
            lanes = [
                base + half + (lane % size if size == 2 else lane // 2) + (VECTOR if lane // size % 2 else 0)
                for base in range(0, VECTOR, 4)
                for lane in range(4)
            ]
            halves.append(chosen(first, second, lanes))
        return builder.fadd(*halves, flags=("reassoc",))

    a, b, c, d = vectors
    result, count = folded(folded(a, b, 1), folded(c, d, 1), 2), VECTOR
    while count > _SLOTS:
        count //= 2
        parts = (chosen(result, result, list(range(first, first + count))) for first in (0, count))
        result = builder.fadd(*parts, flags=("reassoc",))
    return result


def _turned(rows: int) -> Any:
    """Scores of :data:`_SLOTS` slots by so many queries; arguments of :data:`turned_at`."""

    @intrinsic
    def turned(
        context: Any,
        latents: Any,
        latents_row: Any,
        pairs: Any,
        cos: Any,
        sin: Any,
        table_row: Any,
        queries: Any,
        queries_row: Any,
        scores: Any,
        scores_row: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            latents, latents_row, pairs, cos, sin, table_row, queries, queries_row, scores, scores_row = arguments
            vector, four = ir.Constant(_INT64, VECTOR), ir.VectorType(_NUMBER, _SLOTS)
            zero, each = ir.Constant(_NUMBERS, None), [(row, slot) for row in range(rows) for slot in range(_SLOTS)]
            sums = {one: cgutils.alloca_once_value(builder, zero) for one in each}
            whole, most = builder.sdiv(pairs, vector), ir.Constant(_INT64, LANES)
            filled = builder.mul(builder.sdiv(builder.add(pairs, ir.Constant(_INT64, LANES - 1)), most), most)

            def add(slots: tuple[int, ...], pair: Any, lanes: Any) -> None:
                behind, flags = builder.add(pair, pairs), ("contract",)
                own = [
                    [
                        builder.load(_place(builder, queries, _NUMBERS, row, queries_row, column), align=4)
                        for column in (pair, builder.add(pair, filled))
                    ]
                    for row in range(rows)
                ]
                for slot in slots:
                    left, right = (
                        _load(builder, _place(builder, latents, _NUMBERS, slot, latents_row, column), lanes)
                        for column in (pair, behind)
                    )
                    c, s = (
                        builder.load(_place(builder, table, _NUMBERS, slot, table_row, pair), align=4)
                        for table in (cos, sin)
                    )
                    first = builder.fsub(
                        builder.fmul(left, c, flags=flags), builder.fmul(right, s, flags=flags), flags=flags
                    )
                    second = builder.fadd(
                        builder.fmul(right, c, flags=flags), builder.fmul(left, s, flags=flags), flags=flags
                    )
                    for row in range(rows):
                        _add_product(builder, sums[row, slot], own[row][0], first)
                        _add_product(builder, sums[row, slot], own[row][1], second)

            done = builder.mul(whole, vector)
            # With more slots at a time, sums and queries would not fit the registers.
            for slots in ((0, 1), (2, 3)):
                with cgutils.for_range(builder, whole) as loop:
                    add(slots, builder.mul(loop.index, vector), None)
                with builder.if_then(builder.icmp_signed("<", done, pairs)):
                    add(slots, done, _first_lanes(builder, builder.sub(pairs, done)))
            for row in range(rows):
                result = _gathered(builder, [builder.load(sums[row, slot]) for slot in range(_SLOTS)])
                builder.store(result, _place(builder, scores, four, row, scores_row, 0), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return turned


_turned_1, _turned_2, _turned_3 = (_turned(rows) for rows in (1, 2, 3))


@compiled
def turned_at(
    rows, slots, latents, latents_row, pairs, cos, sin, table_row, queries, queries_row, scores, scores_row, ahead
):
    """Write scores of pairs that stand in the latents, which are turned on the way; by addresses and bytes a row.

    Parameters
    ----------
    rows, slots
        Queries, and slots, a multiple of four.
    latents
        Of the first slot: left halves of the pairs, then right halves. No others are touched.
    pairs
        How many.
    cos, sin
        Turns of each slot, filled up to a multiple of :data:`LANES` by zeros.
    queries : (rows, 2 pairs)
        Left halves, filled up by zeros, then right halves, filled up.
    scores : (rows, slots)
        Receives them.
    ahead
        As for :func:`product_at`.
    """
    done, blocks = 0, (rows + 2) // 3
    for number in range(blocks):
        many = rows * (number + 1) // blocks - done
        own, out = queries + done * queries_row, scores + done * scores_row
        for slot in range(0, slots, _SLOTS):
            fetch(ahead)
            at, to = latents + slot * latents_row, out + 4 * slot
            c, s = cos + slot * table_row, sin + slot * table_row
            if many == 3:
                _turned_3(at, latents_row, pairs, c, s, table_row, own, queries_row, to, scores_row)
            elif many == 2:
                _turned_2(at, latents_row, pairs, c, s, table_row, own, queries_row, to, scores_row)
            else:
                _turned_1(at, latents_row, pairs, c, s, table_row, own, queries_row, to, scores_row)
        done += many


@intrinsic
def transpose(context: Any, source: Any, step: Any, target: Any, target_step: Any) -> Any:
    """Write 16 rows of 16 words of 32 bits, so many words from row to row, as 16 columns; by their addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, step, target, target_step = arguments

        def place(address: Any, row: int, width: Any) -> Any:
            offset = builder.mul(width, ir.Constant(_INT64, 4 * row))
            return builder.inttoptr(builder.add(address, offset), _WORDS.as_pointer())

        def chosen(first: Any, second: Any, lanes: list[int]) -> Any:
            return builder.shuffle_vector(first, second, ir.Constant(_WORDS, lanes))

        rows = [builder.load(place(source, row, step), align=4) for row in range(LANES)]
        for bit in (1, 2, 4, 8):
            # Squares of this size change places across the diagonal.
            upper = [lane + LANES - bit if lane & bit else lane for lane in range(LANES)]
            lower = [lane + LANES if lane & bit else lane + bit for lane in range(LANES)]
            for row in [row for row in range(LANES) if not row & bit]:
                pair = rows[row], rows[row + bit]
                rows[row], rows[row + bit] = chosen(*pair, upper), chosen(*pair, lower)
        for number, row in enumerate(rows):
            builder.store(row, place(target, number, target_step), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@compiled
def columns_at(rows, count, source, source_row, target, target_row):
    """Write float32 (rows, count) as columns (count, rows); by addresses and bytes a row.

    ``rows`` is a multiple of :data:`LANES`, ``count`` no smaller. Of the last squares two may overlap.
    """
    for row in range(0, rows, LANES):
        for column in range(0, count, LANES):
            first = min(column, count - LANES)
            at, to = source + row * source_row + 4 * first, target + first * target_row + 4 * row
            transpose(at, source_row // 4, to, target_row // 4)


@compiled
def write_columns(rows, columns):
    """Write rows (m, n) of float32 as columns (n, >= m), both numbers being multiples of :data:`LANES`."""
    columns_at(rows.shape[0], rows.shape[1], rows.ctypes.data, rows.strides[0], columns.ctypes.data, columns.strides[0])
