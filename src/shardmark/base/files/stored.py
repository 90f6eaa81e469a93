"""The base of models that are stored as files."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Stored(BaseModel):
    """Base of the stored models: frozen, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, serialize_by_alias=True)
