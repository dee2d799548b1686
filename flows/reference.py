"""The reference page, printed from the very objects that the code runs on, so it cannot drift.

    python -m flows.reference docs/reference.md

`make docs` writes it; a test holds the committed page to what this module prints.
"""

import ast
import inspect
import json
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas import config
from schemas.expectations import RULES, Rule, imported
from schemas.tables import TABLES, Table
from schemas.views import view_sources, view_title
from tasks.query import describe_columns

HEADER = """\
# Reference

Printed by `make docs` from the code. [Concepts](concepts.md), [the lake](lake.md) and
[operations](operations.md) explain what this page lists.
"""

KINDS = {"object": "table", "null": "absent"}
BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def type_name(kind: pa.DataType) -> str:
    """An Arrow type without the names that Arrow versions give to list elements."""
    if isinstance(kind, pa.MapType):
        return f"map<{type_name(kind.key_type)}, {type_name(kind.item_type)}>"
    if isinstance(kind, pa.ListType):
        return f"list<{type_name(kind.value_type)}>"
    if isinstance(kind, pa.StructType):
        fields = (kind.field(index) for index in range(kind.num_fields))
        return f"struct<{', '.join(f'{f.name} {type_name(f.type)}' for f in fields)}>"
    return str(kind)


def _columns_of_table(table: Table) -> str:
    rows = (
        (f"`{c.name}`", f"`{type_name(c.type)}`", "yes" if c.nullable else "", c.description)
        for c in table.all_columns
    )
    checks = "".join(f"\nCHECK `{name}`: `{sql}`.\n" for name, sql in table.checks.items())
    return (
        f"### {table.name}\n\n{table.description} Rows lie sorted by "
        f"{', '.join(f'`{name}`' for name in table.sort_by)}.\n{checks}\n"
        + _table(("column", "type", "may be NULL", "meaning"), rows)
    )


def _columns_of_view(name: str, sql: str) -> str:
    rows = ((f"`{c}`", f"`{kind}`", text) for c, kind, text in describe_columns(name))
    title = view_title(sql)
    return f"### {name}\n\n{title[0].upper()}{title[1:]}\n\n" + _table(
        ("column", "type", "meaning"), rows
    )


def _rules(title: str, rules: tuple[Rule, ...]) -> str:
    header = ("rule", "severity", "counted for each", "holds when", "protects against", "at most")
    rows = []
    for rule in rules:
        at_most = str(rule.maximum).removesuffix(".0")
        texts = (rule.description, rule.protects_against, at_most)
        rows.append((f"`{rule.id}`", rule.severity, rule.level, *texts))
    return f"### {title}\n\n" + _table(header, rows)


@cache
def key_texts() -> dict[tuple[str, str], str]:
    """The string below each attribute of a section, by class and name; Python itself drops it."""
    texts = {}
    for section in ast.parse(inspect.getsource(config)).body:
        if isinstance(section, ast.ClassDef):
            for lines in pairwise(section.body):
                match lines:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        texts[section.name, name] = text
    return texts


def allowed_values(field: dict[str, Any]) -> str:
    """Type and range of a JSON schema's property, as the reference words it."""
    if "anyOf" in field:
        return " or ".join(allowed_values(option) for option in field["anyOf"])
    if "const" in field or "enum" in field:
        values = field.get("enum", [field.get("const")])
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    if "pattern" in field:
        return f"string matching `{field['pattern']}`"
    kind = KINDS.get(field["type"]) or field["type"]
    bounds = [f"{sign} {field[name]}" for name, sign in BOUNDS.items() if name in field]
    return f"{kind} {', '.join(bounds)}".strip()


def _sections(path: str, name: str, definitions: dict[str, Any]) -> Iterator[str]:
    """The section at `path`, described by the model class `name`, and those inside it."""
    schema = definitions[name]
    rows, inner = [], []
    header = ("key", "value", "default", "may change on resume", "meaning")
    for key, field in schema["properties"].items():
        references = [f["$ref"] for f in (field, *field.get("anyOf", ())) if "$ref" in f]
        if references:
            inner.append((f"{path}.{key}", references[0].rpartition("/")[2]))
            continue
        default = "required"
        if "default" in field:
            default = "absent" if field["default"] is None else f"`{json.dumps(field['default'])}`"
        may_change, text = field.get("may_change", False), key_texts().get((name, key), "")
        rows.append((f"`{key}`", allowed_values(field), default, "yes" if may_change else "", text))
    about = " ".join(schema.get("description", "").split())
    yield f"### [{path}]\n\n{about}\n\n".replace("\n\n\n\n", "\n\n") + _table(header, rows)
    for inner_path, inner_name in inner:
        yield from _sections(inner_path, inner_name, definitions)


def page() -> str:
    """The whole page as Markdown."""
    schema = config.RunConfig.model_json_schema()
    parts = [HEADER, "## Tables\n", *(_columns_of_table(table) for table in TABLES.values())]
    parts += ["## Views\n", *(_columns_of_view(*view) for view in view_sources().items())]
    parts += ["## Rules\n", *(_rules(f"Gate {gate}", rules) for gate, rules in RULES.items())]
    parts.append(_rules("Imports", imported.RULES))
    parts.append("## Run file\n")
    for path, field in schema["properties"].items():
        parts += _sections(path, field["$ref"].rpartition("/")[2], schema["$defs"])
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
