"""The command line: ``ZeroCLI`` for scripts, and ``lightning-zero`` (= ``python -m lightning_zero``)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero import tools
from lightning_zero.config import HostOffload, NvmeOffload, Offload, Placement, Stage, Tier
from lightning_zero.plan import ZeroPlan, build_plan
from lightning_zero.precision import PrecisionName, ZeroPrecision

__all__ = ["PlanCLI", "ZeroCLI", "main"]

DEFAULT_STRATEGY = "zero3"

# Short names that the Trainer takes too.
_PRECISIONS: Mapping[str, PrecisionName] = {
    "32": "32-true",
    "64": "64-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "None": "32-true",
}


class ZeroCLI(LightningCLI):
    """``LightningCLI`` with the ZeRO strategies registered and ``zero3`` as the default strategy.

    Takes what ``LightningCLI`` takes; ``trainer_defaults`` and the configuration override the default strategy.
    """

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what ``LightningCLI`` adds."""
        self.trainer_defaults = {"strategy": DEFAULT_STRATEGY, **self.trainer_defaults}
        super().add_core_arguments_to_parser(parser)


class PlanCLI(ZeroCLI):
    """Builds the model of a configuration on the meta device and the plan for it; trains nothing, allocates nothing.

    Understands every option of ``fit``, so that the configuration of a run can be given as it is. The stage, the number
    of processes and the other settings of the plan come from ``trainer`` unless they are given themselves.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the settings of the plan."""
        add = parser.add_argument
        add("--stage", type=Stage | None, default=None, help="ZeRO stage. From trainer.strategy if not given.")
        add(
            "--world_size",
            "--world-size",
            type=PositiveInt | None,
            default=None,
            help="Number of processes. trainer.devices * trainer.num_nodes if not given.",
        )
        add("--units", type=list[str] | None, default=None, help="Class names that become units.")
        add(
            "--bucket_mib",
            "--bucket-mib",
            type=PositiveFloat | None,
            default=None,
            help="Size of a gradient bucket in MiB (stages 1 and 2).",
        )
        add("--prefetch", type=NonNegativeInt | None, default=None, help="Units gathered ahead (stage 3).")
        add(
            "--offload",
            type=Literal["host", "nvme", "none"] | None,
            default=None,
            help="Where optimizer state rests, in stage 3 parameters too. From trainer.strategy if not given.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse ``args``, the command line without the word ``plan``.

        ``LightningCLI`` does the same with a warning about ``sys.argv``, which holds that word too. A seed would be set
        for nothing: nothing is initialised.
        """
        if isinstance(args, dict | Namespace):
            self.config = parser.parse_object(args)
        else:
            self.config = parser.parse_args(args)
        self.config["seed_everything"] = False

    def instantiate_classes(self) -> None:
        """Build the model, on the meta device, and nothing else.

        Raises:
            SystemExit: if a setting of the plan is missing or wrong.
        """
        with _said_in_one_line():
            self.settings = plan_settings(self.config)
            precision = ZeroPrecision(
                _PRECISIONS.get(str(self.config.trainer.precision), self.config.trainer.precision)
            )
        with torch.device("meta"):
            only_model = Namespace(model=self.config.model)  # type: ignore[no-untyped-call]
            self.model = self.parser.instantiate(only_model).model
            self.model.configure_model()
        precision.convert_module(self.model)
        self.settings |= {"param_dtype": precision.param_dtype, "reduce_dtype": precision.reduce_dtype}

    def plan(self) -> ZeroPlan:
        """The plan for the model.

        Raises:
            SystemExit: if the settings do not fit the model.
        """
        with _said_in_one_line():
            return build_plan(self.model, **self.settings)


def plan_settings(config: Namespace) -> dict[str, Any]:
    """Keyword arguments of ``build_plan``: options of the command line, else those of the configured strategy.

    Raises:
        ValueError: if the strategy is not one of this package or the number of processes is not known.
    """
    settings = _strategy_arguments(config.trainer.strategy)
    for name in ("stage", "units", "bucket_mib", "prefetch"):
        if config[name] is not None:
            settings[name] = config[name]
    if "stage" not in settings:
        raise ValueError(f"--stage is needed: trainer.strategy is {_shown(config.trainer.strategy)}.")
    settings["placement"] = Placement.from_stage(settings.pop("stage"))
    settings["offload"] = _offload(config["offload"], settings.get("offload"), settings["placement"])
    settings["world_size"] = config.world_size or _world_size(config.trainer.devices, config.trainer.num_nodes)
    return settings


def _strategy_arguments(strategy: Any) -> dict[str, Any]:
    """The plan's settings that a configured strategy holds; none for a strategy that is not ours."""
    if isinstance(strategy, str) and strategy.startswith("zero") and strategy in StrategyRegistry:
        given: Mapping[str, Any] = StrategyRegistry[strategy]["init_params"]
    elif isinstance(strategy, Namespace) and strategy.class_path.rpartition(".")[2] == "ZeroStrategy":
        given = vars(strategy.init_args)
    else:
        return {}
    return {name: given[name] for name in ("stage", "units", "bucket_mib", "prefetch", "offload") if name in given}


def _offload(asked: str | None, configured: Any, placement: Placement) -> Offload | None:
    """What ``--offload`` asks for, with the configured settings where they are of that kind.

    Args:
        asked: the option; ``None`` if it was not given.
        configured: the strategy's ``offload``: a policy, or what it would be made of.
        placement: what is sharded.

    Raises:
        ValueError: if the configured settings are not usable.
    """
    policy: Offload | None = configured
    if isinstance(configured, Namespace):
        settings = vars(configured.init_args if "class_path" in configured else configured)
        policy = (NvmeOffload if "path" in settings else HostOffload)(**settings)
    tier = {"host": Tier.HOST, "nvme": Tier.DISK}.get(asked or "")
    if asked is None or (policy is not None and policy.tier is tier):
        return policy
    if tier is Tier.HOST:
        return HostOffload(parameters=placement.shards_parameters)
    if tier is Tier.DISK:
        return NvmeOffload(path=os.curdir, parameters=placement.shards_parameters)  # a plan does not look there
    return None


def _world_size(devices: Any, num_nodes: int) -> int:
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    if isinstance(devices, list) and devices:
        devices = len(devices)
    if not isinstance(devices, int) or devices < 1:
        raise ValueError(f"--world_size is needed: trainer.devices is {devices!r}.")
    return devices * num_nodes


def _shown(strategy: Any) -> str:
    return strategy.class_path if isinstance(strategy, Namespace) else repr(strategy)


@contextmanager
def _said_in_one_line() -> Iterator[None]:
    """Wrong settings are for the person at the terminal: no traceback."""
    try:
        yield
    except ValueError as error:
        raise SystemExit(f"lightning-zero plan: error: {error}") from None


_COMMANDS = {
    "plan": "print how a model would be split over processes, and what that takes; needs one process and no memory",
    "inspect": "print what is inside a checkpoint and verify its files",
    "consolidate": "write a checkpoint as one ordinary file, or as safetensors",
    "fit": "train",
    "validate": "one pass over the validation data",
    "test": "one pass over the test data",
    "predict": "predictions for the predict data",
}

_TOOLS = {"inspect": tools.inspect, "consolidate": tools.consolidate}


def _run_tool(tool: Callable[[Sequence[str]], int], args: Sequence[str]) -> None:
    try:
        code = tool(args)
    except KeyboardInterrupt:
        print(f"lightning-zero {tool.__name__}: interrupted", file=sys.stderr)  # noqa: T201
        code = 130  # as shells have it
    except BrokenPipeError:  # the reader has seen enough, as `head` has; nothing more can be printed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    if code:
        raise SystemExit(code)


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-zero``.

    Args:
        args: The command line without the program's name; the process's own if not given.

    Raises:
        SystemExit: for wrong options, and with 1 if a command found something wrong.
    """
    given = sys.argv[1:] if args is None else list(args)
    parser = argparse.ArgumentParser(
        prog="lightning-zero",
        description="ZeRO for PyTorch Lightning. `lightning-zero COMMAND --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:<13}{text}" for name, text in _COMMANDS.items()),
    )
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help=f"one of {', '.join(_COMMANDS)}")
    command = parser.parse_args(given[:1]).command
    if command in _TOOLS:
        _run_tool(_TOOLS[command], given[1:])
        return
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `--model my_module.MyModel`, as with `python -m lightning_zero`
    if command != "plan":
        ZeroCLI(args=None if args is None else given)
        return
    cli = PlanCLI(
        args=given[1:],
        run=False,
        seed_everything_default=False,
        save_config_callback=None,
        load_from_checkpoint_support=False,
        parser_kwargs={"prog": "lightning-zero plan", "description": PlanCLI.__doc__},
    )
    print(cli.plan().describe())  # noqa: T201
