"""What all sections of settings share."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One TOML table. Unknown keys fail; the docstring under a field is its help text."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)
