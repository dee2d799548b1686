"""Arrow rows as JSON lines, column by column, without a Python object a number.

A float is the shortest text that parses back to the same value of its own width, so a float32 keeps
its bits. Numbers that JSON does not have are refused before they get here.
"""

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_TEXT = pa.string()


def json_lines(batch: pa.RecordBatch) -> bytes:
    """One object a row, in column order, each ended by a newline.

    Raises `ValueError` for a column of a type that JSON has no form for.
    """
    names = batch.schema.names
    columns = [json_texts(batch.column(i), name) for i, name in enumerate(names)]
    lines = _objects(names, columns, batch.num_rows)
    return "".join(f"{line}\n" for line in lines.to_pylist()).encode()


def json_texts(array: pa.Array, name: str) -> pa.Array:
    """A string array with the JSON text of each value; `name` is the column's, for messages."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return json_texts(array.dictionary_decode(), name)
    if pa.types.is_fixed_size_list(kind):
        return json_texts(array.cast(pa.list_(kind.value_type)), name)
    if pa.types.is_null(kind):
        texts = pa.nulls(len(array), _TEXT)
    elif pa.types.is_map(kind):
        texts = _maps(array, name)
    elif pa.types.is_list(kind):
        texts = _lists(array, name)
    elif pa.types.is_struct(kind):
        names = [field.name for field in kind]
        inner = [json_texts(column, name) for column in array.flatten()]
        texts = _where(array.is_valid(), _objects(names, inner, len(array)), pa.scalar(None, _TEXT))
    else:
        texts = _scalars(array, name)
    return pc.fill_null(texts, "null")


def _scalars(array: pa.Array, name: str) -> pa.Array:
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        texts = [
            None if v is None else json.dumps(v, ensure_ascii=False) for v in array.to_pylist()
        ]
        return pa.array(texts, _TEXT)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return array.cast(_TEXT)
    if pa.types.is_floating(kind):
        texts = array.cast(_TEXT)
        # Without a point, -0 would be read as the integer 0.
        whole = pc.call_function(
            "match_substring_regex", [texts], pc.MatchSubstringOptions(r"^-?\d+$")
        )
        return _where(whole, _concat(texts, ".0"), texts)
    if pa.types.is_temporal(kind) and not pa.types.is_duration(kind):
        return _concat('"', array.cast(_TEXT), '"')
    raise ValueError(
        f"Column {name} has type {kind}, which JSON has no form for; cast it to text in the query "
        "or export with --format parquet."
    )


def _lists(array: pa.Array, name: str) -> pa.Array:
    return _joined(array, json_texts(array.flatten(), name), "[", "]")


def _maps(array: pa.Array, name: str) -> pa.Array:
    lists = as_lists(array)
    keys, values = lists.flatten().flatten()
    texts = [json.dumps(str(key), ensure_ascii=False) for key in keys.to_pylist()]
    items = _concat(pa.array(texts, _TEXT), ":", json_texts(values, name))
    return _joined(lists, items, "{", "}")


def as_lists(array: pa.MapArray) -> pa.ListArray:
    """A map as the list of its entries {key, value}, which is how Arrow stores it."""
    entry = pa.struct([("key", array.type.key_type), ("value", array.type.item_type)])
    return array.cast(pa.list_(entry))


def _joined(lists: pa.ListArray, texts: pa.Array, opening: str, closing: str) -> pa.Array:
    """`texts`, one for each element of the lists, joined list by list; NULL where a list is."""
    lengths = pc.call_function("list_value_length", [lists]).fill_null(0).to_numpy()
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    parts = pa.ListArray.from_arrays(offsets, texts, mask=lists.is_null())
    return _concat(opening, pc.call_function("binary_join", [parts, ","]), closing)


def _objects(names: list[str], columns: list[pa.Array], length: int) -> pa.Array:
    parts: list[pa.Array | str] = []
    for index, (name, column) in enumerate(zip(names, columns, strict=True)):
        comma = "," if index else "{"
        parts += [f"{comma}{json.dumps(name, ensure_ascii=False)}:", column]
    if not parts:
        return pa.array(["{}"] * length, _TEXT)
    return _concat(*parts, "}")


def _concat(*parts: pa.Array | str) -> pa.Array:
    """Text beside text, element by element; NULL where a part is."""
    return pc.call_function("binary_join_element_wise", [*parts, ""])


def _where(condition: pa.Array, yes: pa.Array, no: pa.Array | pa.Scalar) -> pa.Array:
    return pc.call_function("if_else", [condition, yes, no])
