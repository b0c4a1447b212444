"""Helpers for tests of distributed code, and the one-process reference that every plugin is compared with."""

from .comparison import (
    assert_close,
    assert_close_loose,
    assert_equal,
    assert_equal_in_group,
    assert_hf_output_close,
    assert_not_equal,
    check_state_dict_equal,
)
from .pytest_wrapper import run_on_environment_flag
from .reference import TINY_MODELS, Run, TinyModel, reference_run, reference_run_16bit, tensor_errors, worst_error
from .utils import (
    DummyDataloader,
    clear_cache_before_run,
    free_port,
    parameterize,
    rerun_if_address_is_in_use,
    rerun_on_exception,
    skip_if_not_enough_gpus,
    spawn,
)

__all__ = [
    "TINY_MODELS",
    "DummyDataloader",
    "Run",
    "TinyModel",
    "assert_close",
    "assert_close_loose",
    "assert_equal",
    "assert_equal_in_group",
    "assert_hf_output_close",
    "assert_not_equal",
    "check_state_dict_equal",
    "clear_cache_before_run",
    "free_port",
    "parameterize",
    "reference_run",
    "reference_run_16bit",
    "rerun_if_address_is_in_use",
    "rerun_on_exception",
    "run_on_environment_flag",
    "skip_if_not_enough_gpus",
    "spawn",
    "tensor_errors",
    "worst_error",
]
