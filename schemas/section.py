"""What every table of the run TOML has in common."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MAY_CHANGE: dict[str, Any] = {"may_change": True}

Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
