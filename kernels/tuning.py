"""Describes how to tune a kernel: the type of its configs, the configs to try, legal configs, and the default.

A launch without a config never tunes.  It takes the best measured config for its device and bucket (range of rows), or
else the default.  The file `kernels/<op>/choices.json` holds the best configs.  An entry names the best kernel, and the
bench run that proves it:

    {"NVIDIA H200": {"rows:1": {"kernel": "gemv", "record": "<run id>"}}}

After tuning, an entry also has the best config of each kernel (`configs`), and their dtypes (`scheme`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rooflab.reference.spec import Case, Scalar, Scheme, get_scheme
from rooflab.roofline.occupancy import MAX_REGISTERS_PER_THREAD, MAX_THREADS_PER_CTA, occupancy

BF16 = get_scheme("bf16")
"""The scheme bf16: the default of the functions of a `Tuning`."""


class LaunchConfig:
    """The base class of configs of Triton and Gluon kernels.  It turns a config into the arguments of a launch."""

    @cached_property
    def launch_arguments(self) -> Mapping[str, Any]:
        """Returns the fields as arguments of a launch.  Names are in capitals, except `num_warps` and `num_stages`."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]  # of a derived dataclass
        return {name if name in ("num_warps", "num_stages") else name.upper(): getattr(self, name) for name in names}


@dataclass(frozen=True)
class Footprint:
    """The least resources that a CTA needs, and the number of CTAs of the grid.  They are computed from a kernel's
    config, without compilation."""

    threads: int
    registers: int
    """The least registers per thread: accumulators and operands that are in use at the same time."""
    shared_bytes: int
    """Bytes of the tiles that are in shared memory at the same time."""
    ctas: int
    tensor_flops: float = 0.0
    """FLOPs of tensor cores per CTA, with padding; 0 if the footprint does not give them."""

    @property
    def fits(self) -> bool:
        """Returns whether a CTA can run on Hopper without spilling registers."""
        resource_values = self.threads, self.registers, self.shared_bytes
        within_limits = 0 < self.threads <= MAX_THREADS_PER_CTA and self.registers <= MAX_REGISTERS_PER_THREAD
        return within_limits and occupancy((9, 0), *resource_values).ctas_per_sm > 0


def space(config_type: type, **values: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
    """Returns a function for the field `configs` of a `Tuning`.  It makes all combinations of given field values."""

    def configs(case: Case, scheme: Scheme = BF16) -> tuple[Any, ...]:
        combinations = (zip(values, field_values, strict=True) for field_values in itertools.product(*values.values()))
        return tuple(config_type(**dict(field_values)) for field_values in combinations)

    return configs


@dataclass(frozen=True)
class Defaults:
    """Holds a table of default configs, the `heuristic` of a `Tuning`.  A call gets the config of the first row that
    fits its sizes.  A row whose config is illegal is skipped.

    The row `({"M": 64, "itemsize": 2}, config)` fits if M is at most 64 and `itemsize`, the bytes of an activation, at
    most 2.  Other keys are the sizes in `case` and the keys of `sizes(case, scheme)`."""

    rows: tuple[tuple[Mapping[str, int], Any], ...]
    sizes: Callable[[Case, Scheme], Mapping[str, int]] | None = None

    def __call__(self, case: Case, scheme: Scheme = BF16, *, is_legal: Callable[..., bool]) -> Any:
        """Returns the first config of the table that is legal and fits the sizes of the case.  Raises `ValueError` if
        there is none."""
        sizes: dict[str, Any] = {"itemsize": scheme.activation.itemsize, **case}
        if self.sizes is not None:
            sizes |= self.sizes(case, scheme)
        for max_sizes, config in self.rows:
            if all(sizes[name] <= max_size for name, max_size in max_sizes.items()) and is_legal(config, case, scheme):
                return config
        raise ValueError(f"config: no default is legal for {case} in {scheme.name}")


@dataclass(frozen=True)
class Tuning:
    """Holds the functions that tune a kernel.  Their last argument is a scheme (dtypes), bf16 by default."""

    config_type: type
    """The dataclass of the kernel's `config`, flat and frozen."""
    configs: Callable[..., tuple[Any, ...]]
    """`configs(case, scheme=BF16)`: returns the configs to try; some may be illegal."""
    heuristic: Callable[..., Any]
    """`heuristic(case, scheme=BF16)`: returns the default config; a `Defaults` table can be this function."""
    footprint: Callable[..., Footprint] | None = None
    """`footprint(config, case, scheme=BF16)`: returns a launch's resources; None if they cannot be computed."""
    rule: Callable[..., bool] | None = None
    """`rule(config, case, scheme=BF16)`: returns whether a config whose footprint fits meets a further condition."""

    def __post_init__(self) -> None:
        type_name = self.config_type.__name__
        if not dataclasses.is_dataclass(self.config_type) or not self.config_type.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise TypeError(f"tuning: expected {type_name} to be a frozen dataclass")
        for field_name, type_hint in get_type_hints(self.config_type).items():
            value_types = {*map(type, get_args(type_hint))} if get_origin(type_hint) is Literal else {type_hint}
            if not value_types <= {*get_args(Scalar)}:
                raise TypeError(f"tuning: expected {type_name}.{field_name} to be a JSON scalar, got {type_hint}")
        if isinstance(self.heuristic, Defaults):
            object.__setattr__(self, "heuristic", partial(self.heuristic, is_legal=self.is_legal))

    def is_legal(self, config: Any, case: Mapping[str, Any], scheme: Scheme = BF16) -> bool:
        """Returns whether a config can run: its footprint fits on an SM, and it meets the `rule`."""
        resources_fit = self.footprint is None or self.footprint(config, case, scheme).fits
        return resources_fit and (self.rule is None or self.rule(config, case, scheme))

    def legal_configs(self, case: Case, scheme: Scheme) -> list[Any]:
        """Returns the legal configs for `case` without duplicates, the default first."""
        all_configs = dict.fromkeys((self.heuristic(case, scheme), *self.configs(case, scheme)))
        return [config for config in all_configs if self.is_legal(config, case, scheme)]

    def make_config(self, values: Mapping[str, Any]) -> Any:
        """Makes the config with these `values` (from a record or `choices.json`).  A field with a default may be
        missing: the record may be older than the field.  Raises `ValueError` on wrong fields."""
        try:
            return self.config_type(**values)
        except TypeError as error:
            fields_text = ", ".join(config_field.name for config_field in dataclasses.fields(self.config_type))
            raise ValueError(f"config: expected {fields_text}, got {', '.join(values)}") from error


BUCKET_ROWS = (1, 16, 64, 512, float("inf"))
"""The upper ends of the buckets of a step's rows: GEMV, an MMA tile of rows, a wgmma tile, a chunk, compute bound."""


def bucket_of(rows: float) -> str:
    """Returns the name of the bucket of `rows`, such as `rows:16` for 2 to 16 rows.  The last bucket is `rows:inf`."""
    return f"rows:{next(row_limit for row_limit in BUCKET_ROWS if rows <= row_limit)}"


def rows_of(case: Mapping[str, Any]) -> int | None:
    """Returns the number of rows of a step: the first of M, T and B in `case` (the sizes of a call), else None."""
    return next((int(case[size_name]) for size_name in ("M", "T", "B") if size_name in case), None)


def recorded_choice(op: str, card: str, bucket: str) -> Mapping[str, Any]:
    """Returns the entry of an op's file `choices.json` that names the best kernel.  `card` is the GPU, and `bucket` is
    a range of row counts, such as `rows:16`.  Returns an empty mapping if there is no entry."""
    return _load(Path(__file__).parent / op / "choices.json").get(card, {}).get(bucket, {})


@cache
def _load(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}
