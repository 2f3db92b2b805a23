"""Checks the names of devices, GPUs and models in the options of a command.  Turns on Triton's interpreter if there is
no CUDA device.  It asks the CUDA driver for devices, because an import of torch takes more than a second."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from importlib.metadata import version

from rooflab.bench.base.plain import JsonObject
from rooflab.roofline.architecture import get_architecture
from rooflab.roofline.device import get_device
from rooflab.roofline.names import values_by_name


def check_names(values: JsonObject) -> None:
    """Raises `ValueError` if a command's values contain an empty name, or an unknown device, GPU or model.

    Unknown ops and kernels are found later by the registry, because files and plug-ins can add ops and kernels."""
    for option_name in ("op", "kernel", "kernels", "case", "scheme", "suite", "gpu"):
        given_value = values.get(option_name)
        value_texts = given_value if isinstance(given_value, list) else [given_value]
        if any(isinstance(value_text, str) and not value_text.strip() for value_text in value_texts):
            raise ValueError(f"{option_name}: expected a name, got an empty text; is the variable that names it set?")
    if values.get("device") not in (None, "cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {values['device']!r}")
    if gpu := values.get("gpu"):
        get_device(gpu)
    if "dummy" in values and not gpu:
        from rooflab.engine.load.model_files import check_model  # only for the commands that load a model

        check_model(values["model"], values["dummy"])
    elif "gpu" in values and "model" in values:
        get_architecture(values["model"])


def parse_swaps(texts: Sequence[str]) -> dict[str, str]:
    """Maps ops to kernels, from texts `OP=KERNEL`.  Raises `ValueError` on another form or a repeated op."""
    return values_by_name(texts, "swap: expected OP=KERNEL, each op once", lambda op, kernel: kernel)


def interpret_without_gpu() -> None:
    """Sets `TRITON_INTERPRET` if it is unset and there is no CUDA device.  Triton reads this variable only once."""
    if "TRITON_INTERPRET" not in os.environ and not cuda_device_present():
        os.environ["TRITON_INTERPRET"] = "1"


def cuda_device_present() -> bool:
    """Whether torch can use a CUDA device here.  Asks the driver, because importing torch takes more than a second."""
    if "+cpu" in version("torch"):
        return False
    try:
        cuda_library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return cuda_library.cuInit(0) == 0 and cuda_library.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
