"""From a Hugging Face ``config.json`` to modules, parameters and FSDP units."""

from fsdpsim.model.config import ModelConfig, read_model_config
from fsdpsim.model.modules import (
    Module,
    active_parameters,
    flops_per_token,
    matmul_parameters,
    modules,
    parameters,
)
from fsdpsim.model.wrap import Wrapping, form_units, unit_names

__all__ = [
    "ModelConfig",
    "Module",
    "Wrapping",
    "active_parameters",
    "flops_per_token",
    "form_units",
    "matmul_parameters",
    "modules",
    "parameters",
    "read_model_config",
    "unit_names",
]
