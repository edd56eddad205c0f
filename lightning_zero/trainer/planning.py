"""``lightning-zero plan``: how a model would be split, what every stage would take, and which one to choose."""

from __future__ import annotations

import os
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn

from lightning_zero.analysis import ADAM, MemoryEstimate, OptimizerCost, ZeroPlan, build_plan, estimate_memory
from lightning_zero.checkpoint.consolidate import parse_size
from lightning_zero.config import HostOffload, NvmeOffload, Offload, Placement, Stage, Tier
from lightning_zero.trainer.cli import DEFAULT_STRATEGY, ZeroCLI
from lightning_zero.trainer.offline_trainer import attached, configured_optimizer, made_optimizer, model_of
from lightning_zero.trainer.precision import PrecisionName, ZeroPrecision

__all__ = ["PlanCLI", "plan_command"]

# Short names that the Trainer takes too.
_PRECISIONS: Mapping[str, PrecisionName] = {
    "32": "32-true",
    "64": "64-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "None": "32-true",
}


_NAMELESS = "\nThe configuration does not say which class the model is of: give it, as in --model my_module.MyModel."


def plan_command(args: Sequence[str]) -> str:
    """Run ``lightning-zero plan``.

    Args:
        args: the command line without the words ``lightning-zero plan``.

    Returns:
        What is to be printed.

    Raises:
        SystemExit: for wrong options.
    """
    cli = PlanCLI(
        args=list(args),
        run=False,
        seed_everything_default=False,
        save_config_callback=None,
        load_from_checkpoint_support=False,
        parser_kwargs={"prog": "lightning-zero plan", "description": PlanCLI.__doc__},
    )
    return cli.describe()


class PlanCLI(ZeroCLI):
    """Shows how a model would be split over processes, what every stage would take of each, and which one to choose.

    The model is the configuration's (or --model), that of a Hugging Face configuration (--hf-config), or a number of
    parameters (--parameters). It is built on the meta device: nothing is trained or allocated. Understands every option
    of ``fit``, so that the configuration of a run can be given as it is; what concerns data is not looked at. The
    stage, the number of processes and the other settings of the plan come from ``trainer`` unless they are given.
    """

    model: nn.Module | None

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the trainer's arguments and the model's; data may be configured in any way."""
        parser.add_lightning_class_args(Trainer, "trainer")
        parser.set_defaults({f"trainer.{key}": value for key, value in self.trainer_defaults.items()})
        parser.set_defaults({"trainer.strategy": self.trainer_defaults.get("strategy", DEFAULT_STRATEGY)})
        parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True, required=False)
        parser.add_argument("--data", type=dict[str, Any] | str | None, default=None, help="Not looked at.")
        for name in ("ckpt_path", "weights_only"):  # which `fit` has, and so a run's saved configuration
            parser.add_argument(f"--{name}", type=Any, default=None, help="Not looked at.")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what describes the model and the machine, and the settings of the plan."""

        def add(name: str, of: Any, text: str) -> None:
            """An option that may be left out, with its hyphens as hyphens too."""
            spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
            parser.add_argument(*spellings, type=of | None, default=None, help=text)

        add("hf_config", str, "A config.json, or a folder with one.")
        add("parameters", str, "A number of parameters instead of a model: 7.5B.")
        add("device_memory", str, "Memory of one device, for example 80GB or 24GiB: recommends a stage that fits.")
        add("host_memory", str, "Host memory for each process. As much as it takes if not given.")
        add("activations", str, "What has to stay free on the device.")
        add("stage", Stage, "ZeRO stage. From trainer.strategy if not given.")
        add("world_size", PositiveInt, "Number of processes. trainer.devices * trainer.num_nodes if not given.")
        add("units", list[str], "Class names that become units.")
        add("bucket_mib", PositiveFloat, "Size of a gradient bucket in MiB (stages 1 and 2).")
        add("prefetch", NonNegativeInt, "Units gathered ahead (stage 3).")
        rests = "Where optimizer state rests, in stage 3 parameters too. From trainer.strategy if not given."
        add("offload", Literal["host", "nvme", "none"], rests)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse ``args``, the command line without the word ``plan``.

        ``LightningCLI`` does the same with a warning about ``sys.argv``, which holds that word too. A seed would be set
        for nothing: nothing is initialised.
        """
        if isinstance(args, dict | Namespace):
            self.config = parser.parse_object(args)
        else:
            parser.exit_on_error = False
            try:
                self.config = parser.parse_args(_class_first(list(args or ())))
            except ArgumentError as error:
                parser.exit_on_error = True
                nameless = "'lightning.LightningModule'" in str(error)  # what stands for a class that is not said
                parser.error(f"{error}{_NAMELESS if nameless else ''}")
            parser.exit_on_error = True
        self.config["seed_everything"] = False

    def instantiate_classes(self) -> None:
        """Build the model, on the meta device, and nothing else.

        Raises:
            SystemExit: if a setting of the plan is missing or wrong.
        """
        self._refuse_none_and_several()
        with _said_in_one_line():
            self.settings = plan_settings(self.config)
            precision = _precision(self.config.trainer)
            self.sizes = {name: _size(self.config, name) for name in ("device_memory", "host_memory", "activations")}
            self.model = self._module()
            found = self._optimizer()
            if self.model is not None:
                self.model = precision.convert_module(self.model)
        converted = precision.convert_module(nn.Linear(1, 1, device="meta"))
        self.dtype = next(iter(converted.parameters())).dtype
        self.optimizer = found or ADAM
        self.assumed = found is None and isinstance(self.model, LightningModule)
        self.settings |= {"param_dtype": precision.param_dtype, "reduce_dtype": precision.reduce_dtype}

    def _refuse_none_and_several(self) -> None:
        given = [name for name in ("model", "hf_config", "parameters") if self.config.get(name) is not None]
        if len(given) != 1:
            found = f", not {' and '.join(given)}" if given else ""
            self.parser.error(
                f"one of --model (or a configuration with it), --hf-config, --parameters is needed{found}"
            )

    def _module(self) -> nn.Module | None:
        if self.config.hf_config is not None:
            return model_of(self.config.hf_config)
        if self.config.model is None:
            return None
        with torch.device("meta"):
            only_model = Namespace(model=self.config.model)  # type: ignore[no-untyped-call]
            model: LightningModule = self.parser.instantiate(only_model).model
        with attached(model, self.config.trainer, self.settings["world_size"]):
            model.configure_model()
        return model

    def _optimizer(self) -> OptimizerCost | None:
        """The configured one, or the one that the model makes; ``None`` if neither is known."""
        configured = self.config.get("optimizer")
        if configured is not None:
            return configured_optimizer(configured)
        if not isinstance(self.model, LightningModule):
            return None
        return made_optimizer(self.model, self.config.trainer, self.settings["world_size"])

    def plan(self) -> ZeroPlan:
        """The plan for the model.

        Raises:
            SystemExit: if the settings do not fit the model, or there is none but a number of parameters.
        """
        with _said_in_one_line():
            if self.model is None:
                raise ValueError("--parameters is a number, of which there is no plan: give the model.")
            return build_plan(self.model, **self.settings)

    def estimate(self) -> MemoryEstimate:
        """All stages side by side.

        Raises:
            SystemExit: if the settings do not fit the model.
        """
        settings = {name: value for name, value in self.settings.items() if name not in ("placement", "offload")}
        if self.model is None:
            settings = {name: settings[name] for name in ("world_size", "param_dtype", "reduce_dtype")}
        trainer = self.config.trainer
        on_host = trainer.accelerator == "cpu"
        with _said_in_one_line():
            return estimate_memory(
                self.config.parameters if self.model is None else self.model,
                optimizer=self.optimizer,
                dtype=self.dtype,
                accelerator=not on_host,
                receive_buffer=on_host and trainer.num_nodes > 1,
                **settings,
            )

    def describe(self) -> str:
        """The plan, the stages side by side, and what to choose for the given memory."""
        parts = []
        if self.model is not None:
            accelerator = self.config.trainer.accelerator != "cpu"
            parts.append(self.plan().describe(optimizer=self.optimizer, accelerator=accelerator))
        estimate = self.estimate()
        memory = self.sizes["device_memory"]
        advice = None
        if memory is not None:
            advice = estimate.recommend(
                memory, host_nbytes=self.sizes["host_memory"], activations_nbytes=self.sizes["activations"] or 0
            )
        offload = self.settings["offload"] is not None or (
            advice is not None and (advice.name is None or advice.name.endswith("_offload"))
        )
        parts.append(estimate.describe(offload=offload))
        if self.assumed:
            parts.append("Which optimizer the model makes cannot be told without training it: AdamW is assumed.")
        if advice is not None:
            parts.append(f"Recommended: {advice.name or 'nothing'}. {advice.reason}")
        return "\n\n".join(parts)


def _class_first(args: list[str]) -> list[str]:
    """The command line with the model's class in front too.

    A script that fixes its model's class has configurations with arguments of the model alone: their class has to be
    known before they are read. What comes last still wins.
    """
    for index, arg in enumerate(args):
        if arg.startswith("--model="):
            return [arg, *args]
        if arg == "--model":
            return [*args[index : index + 2], *args]
    return args


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
    names = ("stage", "units", "bucket_mib", "prefetch", "offload", "broadcast_buffers")
    return {name: given[name] for name in names if name in given}


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


def _precision(trainer: Namespace) -> ZeroPrecision:
    """That of the Trainer's ``precision``, or of a ``ZeroPrecision`` among its plugins.

    Raises:
        ValueError: if this package cannot serve it.
    """
    plugins = trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins]
    for plugin in plugins:
        if isinstance(plugin, Namespace) and plugin.class_path.rpartition(".")[2] == "ZeroPrecision":
            given = vars(plugin.get("init_args") or Namespace())  # type: ignore[no-untyped-call]
            return ZeroPrecision(given.get("precision", "32-true"), reduce_dtype=given.get("reduce_dtype"))
    return ZeroPrecision(_PRECISIONS.get(str(trainer.precision), trainer.precision))


def _size(config: Namespace, name: str) -> int | None:
    """Bytes of an option.

    Raises:
        ValueError: naming the option, if it is no size.
    """
    try:
        return None if config[name] is None else parse_size(config[name])
    except ValueError as error:
        raise ValueError(f"--{name.replace('_', '-')}: {error}") from None
