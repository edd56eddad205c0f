"""A configuration with other settings: as text, which differs from what was given in these values only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import yaml

from lightning_zero.extensions.tune.search import Settings

__all__ = ["Place", "batch_keys", "configured", "edited", "lookup", "settings_of"]

Place = tuple[str, ...]
_NAME = re.compile(r"(.*\.)?zero([123]?)(_offload)?(_nvme)?$")  # of our strategies, as names or as classes


def lookup(config: Any, place: Place) -> Any:
    """What stands at a place, or None."""
    for key in place:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def batch_keys(section: Any, place: Place = ("data",)) -> Iterator[Place]:
    """Where sizes of batches stand."""
    for key, value in section.items() if isinstance(section, Mapping) else ():
        if key == "batch_size" and isinstance(value, int):
            yield (*place, key)
        yield from batch_keys(value, (*place, str(key)))


def _strategy(config: Any) -> tuple[str, dict[str, Any]]:
    """The name or class of a configured strategy, and its arguments."""
    found = lookup(config, ("trainer", "strategy"))
    return (str(found.get("class_path")), found.get("init_args") or {}) if isinstance(found, Mapping) else (found, {})


def settings_of(config: Any, batch_key: Place | None) -> Settings:
    """What a configuration says of what is tuned."""
    name, given = _strategy(config)
    named, is_class = _NAME.match(str(name)), str(name).endswith("ZeroStrategy")
    stage = str(given.get("stage", 3)) if is_class else named[2] if named else ""
    return Settings(
        stage=int(stage) if stage.isdigit() else None,
        offload=bool(given["offload"] if "offload" in given else named and named[3]),
        prefetch=given.get("prefetch"),
        bucket_mib=given.get("bucket_mib"),
        activations=bool(given.get("activations")),
        batch_size=lookup(config, batch_key) if batch_key else None,
        accumulate=int(lookup(config, ("trainer", "accumulate_grad_batches")) or 1),
    )


def configured(config: Any, given: Settings, chosen: Settings, batch_key: Place | None) -> Any:
    """A configuration with other settings than the given ones."""
    found, (name, held) = deepcopy(config), _strategy(config)
    trainer, is_class = found["trainer"], str(name).endswith("ZeroStrategy")
    changed = {n: value for n, value in chosen._asdict().items() if value != getattr(given, n)}
    arguments: dict[str, Any] = {n: changed[n] for n in ("prefetch", "bucket_mib") if n in changed}
    arguments |= {"activations": "units"} if "activations" in changed else {}
    if moved := chosen[:2] != given[:2]:
        if is_class:
            arguments["stage"] = chosen.stage
        if held.get("offload") or (is_class and chosen.offload):
            arguments["offload"] = "cpu" if chosen.offload else None
    if moved or arguments:
        named, plain = _NAME.match(str(name)), not isinstance(trainer.get("strategy"), Mapping)
        kept = chosen.strategy if moved or not named else str(name).rpartition(".")[2]
        if plain and named and not arguments:
            trainer["strategy"] = kept
        else:
            path = str(name) if is_class else f"{(not plain and named and named[1]) or 'lightning_zero.'}{kept}"
            arguments = {**(held if is_class or named else {}), **arguments}
            trainer["strategy"] = {"class_path": path, **({"init_args": arguments} if arguments else {})}
    if "accumulate" in changed:
        trainer["accumulate_grad_batches"] = chosen.accumulate
    if batch_key and "batch_size" in changed:
        lookup(found, batch_key[:-1])[batch_key[-1]] = chosen.batch_size
    return found


def edited(text: str, wanted: Any) -> tuple[str, bool]:
    """A configuration's text with the values of another, and whether the rest of the text is as it was: where values
    are shared, by anchors for example, comments are lost."""
    found = text
    try:
        while (now := yaml.safe_load(found)) != wanted:
            place, value = next(_differences(now, wanted))
            before, found = found, _with(found, place, value)
            if found == before:
                break
        else:
            return found, True
    except (yaml.YAMLError, IndexError, StopIteration):
        pass
    return yaml.safe_dump(wanted, sort_keys=False), False


def _differences(now: Mapping[str, Any], wanted: Mapping[str, Any], place: Place = ()) -> Iterator[tuple[Place, Any]]:
    for key, value in wanted.items():
        there = now.get(key)
        if isinstance(there, Mapping) and isinstance(value, Mapping) and there.keys() <= value.keys():
            yield from _differences(there, value, (*place, key))
        elif key not in now or there != value:
            yield (*place, key), value


def _with(text: str, place: Place, value: Any) -> str:
    """A text with another value at a place, or an entry for it after the first one of its section."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in place[:-1]:
        node = next(entry for name, entry in node.value if name.value == key)
    column, held = node.start_mark.column, {name.value: (name, entry) for name, entry in node.value}
    if node.flow_style and (isinstance(value, Mapping) or place[-1] not in held):  # which has no lines of its own
        return _with(text, place[:-1], {**lookup(yaml.safe_load(text), place[:-1]), place[-1]: value})
    if place[-1] in held:
        name, entry = held[place[-1]]
        new = f"\n{_block(value, column + 2)}" if isinstance(value, Mapping) else f" {_block(value, 0)}"
        return f"{text[: name.end_mark.index]}:{new}{text[_end(entry) :]}"
    line_end = text.find("\n", _end(node.value[0][1])) % (len(text) + 1)
    return f"{text[:line_end]}\n{_block({place[-1]: value}, column)}{text[line_end:]}"


def _end(node: Any) -> int:
    """Where the last value in a node ends: a section itself ends before the next key, after comments."""
    while not isinstance(node, yaml.ScalarNode) and not node.flow_style and node.value:
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    return int(node.end_mark.index)


def _block(value: Any, column: int) -> str:
    lines = yaml.safe_dump(value, default_flow_style=False, sort_keys=False).removesuffix("...\n").splitlines()
    return "\n".join(" " * column + line for line in lines)
