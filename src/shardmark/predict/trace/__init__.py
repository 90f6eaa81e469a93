"""The trace of a step: operations, bytes and live memory of each unit of a model."""
