"""Great Expectations' own words for a result, rendered again from the lake's row.

A judgement's row says what was expected and observed; from that the expectation is rebuilt as
`tasks.validate` made it, and Great Expectations' renderer words it. Its pages are not used: they
load styles and scripts from seven hosts, give each rule a section, and take 0.2 s each.
"""

import os
import re
from functools import cache
from typing import Any

_BOUND = re.compile(r"(<=|>=) (\S+)")


@cache
def _renderer() -> tuple[Any, Any, Any]:
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    from great_expectations.core import ExpectationValidationResult
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration
    from great_expectations.render.renderer.content_block import (
        validation_results_table_content_block as table,
    )
    from great_expectations.render.view.view import DefaultJinjaComponentView

    view = DefaultJinjaComponentView()

    def result(kind: str, arguments: dict[str, Any], ok: bool) -> Any:
        return ExpectationValidationResult(
            success=ok,
            expectation_config=ExpectationConfiguration(type=kind, kwargs=arguments),
            result={},
            exception_info={
                "raised_exception": False,
                "exception_message": None,
                "exception_traceback": None,
            },
        )

    return table.ValidationResultsTableContentBlockRenderer, view, result


@cache
def expectation_html(rule: str, expected: str) -> str:
    """The expectation as HTML; the plain text `expected` is escaped by the page where it is no
    bound, and then this is empty."""
    bound = _BOUND.fullmatch(expected)
    if bound is None:
        return ""
    renderer, view, result = _renderer()
    end = "max_value" if bound[1] == "<=" else "min_value"
    arguments: dict[str, Any] = {end: float(bound[2])}
    if rule == "rows_present":
        outcome = result("expect_table_row_count_to_be_between", {end: int(bound[2])}, True)
    else:
        outcome = result("expect_column_max_to_be_between", {"column": rule, **arguments}, True)
    cell = renderer.render([outcome]).table[0][1]
    return view.render(
        {
            "content_block": cell.to_json_dict(),
            "section_loop": {"index": 1},
            "content_block_loop": {"index": 1},
        }
    )
