"""What the command lines say: their help, before anything heavy is imported, and what is wrong with an option."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from typing import NoReturn

from lightning_zero.config import parse_size
from lightning_zero.trainer.foreign import answer, did_you_mean

__all__ = [
    "PLAN",
    "PLAN_OPTIONS",
    "UNVERIFIABLE",
    "consolidate_parser",
    "in_one_line",
    "inspect_parser",
    "did_you_mean",
    "no_strategy",
    "refused_by_the_class",
    "short_help",
]

UNVERIFIABLE = 3
_INSPECT = (
    "Print what is inside a checkpoint and verify its files, or list the checkpoints in a folder. Exits with 1 if "
    f"it is damaged or no checkpoint, and with {UNVERIFIABLE} if nothing is wrong with it, but files without checksums "
    "may have changed."
)
_CONSOLIDATE = """\
Write a checkpoint of any kind as ordinary files, with the memory of one process and never of a model.

SOURCE is a sharded directory (of this package, Lightning's strategies, torch.distributed.checkpoint, or DeepSpeed's
ZeRO stages 1 to 3), a .ckpt file, or safetensors. OUT decides what is written:

  OUT.ckpt          one file as Trainer.save_checkpoint writes it on one device: for load_from_checkpoint, and for
                    Trainer.fit(ckpt_path=...) without this package (also .pt, .pth, .bin)
  OUT.safetensors   one file of weights
  OUT               a directory of safetensors files as Hugging Face has it, with an index if there are several

With --format fsdp, OUT is a sharded directory for Lightning's FSDPStrategy. SOURCE must be one of this package or of
ModelParallelStrategy. Only names differ, so the data files of this package's directories are shared (hard links) where
the file system allows it, and either directory can be deleted.

With --format huggingface and --format peft, OUT is a folder for from_pretrained, with its configuration: the model of
transformers in SOURCE with its adapters merged into it, or its adapters alone. These take the memory of the model.
"""
_EXAMPLES = """\
examples:
  lightning-zero consolidate runs/last.ckpt full.ckpt
  lightning-zero consolidate runs/last.ckpt my-model/ --dtype bfloat16 --max-shard-size 2GB --prefix model.
  lightning-zero consolidate runs/last.ckpt for-fsdp.ckpt --format fsdp
  lightning-zero consolidate runs/last.ckpt my-adapter/ --format peft
  lightning-zero consolidate runs/last.ckpt merged/ --format huggingface --base meta-llama/Llama-3.1-8B
"""

PLAN = """\
Shows how a model would be split over processes, what every stage would take of each, and which one to choose.

The model is the configuration's (or --model), that of a Hugging Face configuration (--hf-config), or a number of
parameters (--parameters). It is built on the meta device: nothing is trained or allocated. Understands every option
of ``fit``, so that the configuration of a run can be given as it is; data are only for ``--activations measured``. The
stage, the number of processes and the other settings of the plan come from ``trainer`` unless they are given.
"""
PLAN_OPTIONS = {
    "hf_config": "A config.json, or a folder with one.",
    "parameters": "A number of parameters instead of a model: 7.5B.",
    "device_memory": "Memory of one device, for example 80G or 24GiB: recommends a stage that fits.",
    "host_memory": "Memory of a machine, for all its processes: 512GB. As much as it takes if not given.",
    "activations": "What has to stay free on the device; or measured: with the data's first batch, and no memory.",
    "lora": "Rank of LoRA adapters, which alone are trained, where peft puts them: 16. Needs peft.",
    "lora_targets": "What gets an adapter, if not what peft chooses for the model: q_proj,v_proj, or all-linear.",
    "batch_size": "Of one process, to measure activations of --hf-config with.",
    "sequence_length": "Tokens of each example there.",
    "link_between": "Speed of a machine's link to the others, each way: 10Gbit/s or 10Gbps. Shows seconds.",
    "link_within": "Speed of a process's link within its machine, each way: 100GB/s.",
    "plot": "Write a picture, FILE.png or FILE.svg: a bar of each stage. Needs matplotlib.",
    "json": "Print everything as one JSON object.",
    "stage": "ZeRO stage: 1, 2 or 3. From trainer.strategy if not given.",
    "world_size": "Number of processes. trainer.devices * trainer.num_nodes if not given.",
    "units": "Class names that become units.",
    "bucket_mib": "Size of a gradient bucket in MiB (stages 1 and 2).",
    "prefetch": "Units gathered ahead of the one that computes (stage 3).",
    "offload": "Where optimizer state rests, in stage 3 parameters too: host, nvme, none. As trainer.strategy has it.",
}
RUN_OPTIONS = {
    "config FILE": "A configuration. What stands behind it overrides it.",
    "model CLASS": "The LightningModule, as my_module.MyModel. --model.NAME gives it an argument.",
    "data CLASS": "The LightningDataModule, where the model has no data. --data.NAME gives it an argument.",
    "optimizer CLASS": "The optimizer, and --lr_scheduler its schedule, where the model makes none.",
    "trainer.strategy NAME": "zero1, zero2, zero3 (default), each also with _offload, or one of Lightning.",
    "trainer.strategy.NAME": "An argument of it. --trainer.strategy.help zero3 lists them.",
    "trainer.NAME": "An argument of the Trainer, such as devices, precision, max_epochs.",
    "ckpt_path PATH": "The checkpoint to go on from, or to evaluate: a directory or a file.",
    "print_config": "Print the configuration, with every option and its default, and exit.",
    "help-all": "Show every option, of the Trainer too, and exit. Takes some seconds.",
}


def short_help(command: str, what: str) -> str:
    """What ``lightning-zero COMMAND --help`` prints for a command of the Trainer, which has hundreds of options."""
    plan = {name.replace("_", "-"): text for name, text in PLAN_OPTIONS.items() if command == "plan"}
    options = "\n".join(f"  --{name:<23}{text}" for name, text in {**plan, **RUN_OPTIONS}.items())
    return f"usage: lightning-zero {command} [options]\n\n{what.strip()}\n\noptions:\n{options}\n"


class _Parser(argparse.ArgumentParser):
    """Asks whether a known option was meant."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        known = (option for action in self._actions for option in action.option_strings)
        super().error(f"{message}.{did_you_mean(wrong[1], known)}" if wrong else message)


def inspect_parser() -> argparse.ArgumentParser:
    """The options of ``lightning-zero inspect``."""
    parser = _Parser(prog="lightning-zero inspect", description=_INSPECT)
    parser.add_argument("checkpoint", metavar="DIR", help="a checkpoint (directory, file or URL), or a folder of them")
    verify = "read all files and compare their checksums (default); sizes are compared always"
    parser.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help=verify)
    parser.add_argument("--tensors", action="store_true", help="list every weight with its dtype, shape and size")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    return parser


def consolidate_parser() -> argparse.ArgumentParser:
    """The options of ``lightning-zero consolidate``."""
    parser = _Parser(
        prog="lightning-zero consolidate",
        description=_CONSOLIDATE,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="the checkpoint to read: directory, file or URL")
    add("out", metavar="OUT", help="the file or directory to write")
    what = "what to write, where the name of OUT does not say it"
    add("--format", choices=["ckpt", "safetensors", "fsdp", "huggingface", "peft"], help=what)
    add("--dtype", metavar="DTYPE", help="cast floating-point weights, for example to bfloat16 (bf16)")
    size = "of a file in a directory of safetensors, for example 500M or 2GiB (default: %(default)s)"
    add("--max-shard-size", "--max_shard_size", type=_size, default="5GB", metavar="SIZE", help=size)
    state = "leave the state of optimizers, schedulers and callbacks out of a .ckpt; safetensors never hold it"
    add("--weights-only", "--weights_only", action="store_true", help=state)
    add("--prefix", metavar="PREFIX", help="cut the name of this module off the weights' names: model, or model.")
    add(
        "--base",
        metavar="BASE",
        help="the pretrained model that adapters in SOURCE were trained on, if it is not there",
    )
    add("--overwrite", action="store_true", help="replace what OUT has already; never the source")
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# The parts of jsonargparse's messages: a tree, indented, with a branch for each type that a value may have.
_KEY = re.compile(r'Parser key "([^"]+)"(?: element \d+)?:\s*')
_OWNER = re.compile(r"Problem with given class_path '([^']+)'")
_UNKNOWN = re.compile(r"(?:Group '(.+)' .+ |(?:Subc.+ o|O)ption |unrecognized arguments: --)'?([\w.-]+)")
_NO_CLASS = re.compile(r"Expected a dot import path string: (.+)")
_EXPECTED = re.compile(r"Expected an? ((?:<class|typing\.).+?)(?:\. Got value: .*)?$")
_FOUND = re.compile(r"(?:Got|Given) value: (?:NestedArg\(key='.+?', val='(.*)'\)|(.*))$", re.MULTILINE)
_TYPE = re.compile(r"<class '([\w.]+)'>|typing\.(?:Literal\[(.+?)\])?")
_NAMELESS = " Nothing says which class the model is of: give it, as in --model my_module.MyModel."
_REASON = re.compile(r"^ *- (?!Expected |Does not validate )(.+)$", re.MULTILINE)


def no_strategy(found: str, registered: Iterable[str]) -> str:
    """What to say of a strategy that does not exist; ``registered`` are those that do."""
    names = ["auto", *registered, "lightning_zero.ZeroStrategy"]
    ours = ", ".join(name for name in names if re.match("zero[0-9](?!.*-)", name))  # without other spellings
    theirs = ", ".join(name for name in names if "_" not in name and not name.startswith("zero"))
    there_are = f"There are {ours}, and Lightning's {theirs}, ..."
    if found.startswith("{"):
        return f"trainer.strategy: expected a name, or class_path and init_args, found {found}. {there_are}"
    return f"trainer.strategy: there is no strategy {found!r}.{did_you_mean(found, names)} {there_are}"


def refused_by_the_class(message: str) -> str | None:
    """What a class of this package says of its arguments, in a message of jsonargparse; ``None`` if it was another."""
    reason = _REASON.search(message)
    ours = re.search(r"^Given value: .*class_path='lightning_zero\.", message, re.MULTILINE)
    return f"trainer.strategy: {reason[1]}" if ours and reason else None


def in_one_line(message: str, options_of: Callable[[str], list[str]], strategies: Iterable[str]) -> str:
    """A message of jsonargparse, said shortly: the key, what is wrong with it, and what may have been meant.

    Of the branches the deepest counts: the others failed before they came to the setting. ``options_of`` says what a
    class may be given, or (of an empty path) the parser, and ``strategies`` are the registered ones.
    """
    if not (_KEY.match(message) or _UNKNOWN.match(message)):
        nameless = re.search(r"are required: (\w+\.)?model$", message)
        return " ".join(message.split()) + (f".{_NAMELESS}" if nameless else "")
    lines = [line for line in message.splitlines() if line.strip()]
    depths = [len(line) - len(line.lstrip(" -")) for line in lines]
    lines = [line.strip(" -") for line in lines]
    first = depths.index(max(depths))
    way = [i for i in range(first + 1) if depths[i] < min([*depths[i + 1 : first + 1], depths[i] + 1])]
    keys = [found[1] for i in way if (found := _KEY.match(lines[i]))]
    owner = next((found[1] for i in reversed(way) if (found := _OWNER.match(lines[i]))), "")
    leaves = {_KEY.sub("", line): None for line, depth in zip(lines, depths, strict=True) if depth == depths[first]}
    text, key = " ".join(leaves), ".".join(keys)
    if unknown := _UNKNOWN.match(text):
        name, options = ".".join(filter(None, unknown.groups())), options_of(owner)
        if not owner:
            return f"{text}.{did_you_mean(name, options)}"
        near = answer(name, options) if owner.startswith("lightning_zero.") else did_you_mean(name, options)
        meant = near or f" There are {', '.join(options)}."
        unnamed = owner == "lightning.LightningModule"  # what stands for a class that is not said
        return f"{key}: {owner} has no argument {name!r}.{_NAMELESS if unnamed else meant}"
    found = _FOUND.search("\n".join(lines[first:]))
    value = (found[1] or found[2] or "") if found else ""
    no_class = _NO_CLASS.search(text)
    if key == "trainer.strategy":
        return no_strategy(owner or (no_class[1] if no_class else value), strategies)
    expected = _EXPECTED.match(next(iter(leaves)))
    others = [leaf for leaf in leaves if not leaf.startswith("Expected ")]
    if others or not (expected or no_class):
        return f"{key}: {' '.join(others) or text}{f', found {value!r}' * bool(value)}."
    subtypes = [line for line in lines[:first] if line.startswith("Subtypes: [")]
    types = subtypes[-1][11:-1] if len(leaves) > 1 and subtypes else expected[1] if expected else "a class path"
    types = _TYPE.sub(lambda part: part[1] or part[2] or "", types).replace("NoneType", "null")
    choices = [name for choice in re.findall(r"[\w.-]+", types) for name in (choice, choice.rpartition(".")[2])]
    return f"{key}: expected {'one of ' * (', ' in types)}{types}, found {value!r}.{did_you_mean(value, choices)}"
