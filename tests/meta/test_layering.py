"""The layer table of docs/design.md, held by the imports of every file in src/monarch_async.

A module imports from the layers below it and from what is listed before it in its own layer. The lists here are the order: a new module
is added where what it needs stands before it and what needs it stands after. An import counts wherever it stands, in a function or
under TYPE_CHECKING too, because what a module names is what its reader has to know.

The checker is a set of pure functions over ``{module name: source}``, so that the tests can plant what it must catch.
"""

from __future__ import annotations

import ast
import graphlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = "monarch_async"
SOURCE = Path(__file__).parents[2] / "src" / ROOT
MAX_LINES = 400


def words(text: str) -> list[str]:
    return text.split()


def inside(package: str, text: str) -> list[str]:
    return [f"{package}.{name}" for name in words(text)]


LAYERS: dict[str, list[str]] = {
    "L0": words("errors ids points shape clock options health restart instrument"),
    "L1": inside(
        "_core",
        """address events lines binding stories views lifting parts codec device_ledger faults framing handshake session poly1305
        seal reader order intensity instructions supervision_states supervision""",
    ),
    "L2": inside(
        "_channel",
        """base processors pool keys tls stream pieces dial devices cuda_driver cuda parcels arrivals tensors torch_hook segment memory cma
        pages machine fabric block blocks descriptors gifts""",
    ),
    "L3": inside(
        "_runtime",
        """linux fdwire tasks pulse stacks config start jobfile jobfiles announcing loops history numbering ages context answer thread child
        forked zygote launcher outgoing link room lane peer tree leases device_borrowing borrowing tenant device_lending lending local
        origin debt waits suspects behavior resumed life cell chains roster absent output serving supervisor restarts
        retrying visiting inspecting observing connect branch lives runtime current wrapping stepping remote_pdb debug control asking
        service copying buffers direct data ucx transfers broker fanout health agent bootstrap attach worker client watchdog proc""",
    ),
    "L4": words(
        """supervise ambient shared peering value_mesh future rdma sent port endpoints target sending checkpoints actor spawned members
        lifetime mesh watching exchange checkup processes procs_lifetime procs host supervisors workers info controllers lowlevel
        proc_entry"""
    ),
    "L5": words("tensor parallel testing observe jobs"),
    "L6": words("console dashboard cli __main__"),
}
"""Modules by layer, in order. In L5 and L6 an entry may be a package: inside it modules import each other freely, but in no circle."""

BELOW: dict[str, set[str]] = {
    "L0": set(),
    "L1": {"L0"},
    "L2": {"L0", "L1"},
    "L3": {"L0", "L1", "L2"},
    "L4": {"L0", "L1", "L2", "L3"},
    "L5": {"L0", "L4"},
    "L6": {"L0", "L4", "L5"},
}

MORE_BELOW: dict[str, set[str]] = {
    "testing": {"L1", "L2", "L3"},  # simulated transports, clocks and kits drive what is under test
    "observe": {"L1", "L2", "L3"},  # what there is to see in a process is its runtime
}

SIBLINGS: dict[str, set[str]] = {"tensor": set(), "parallel": {"tensor"}, "testing": set(), "observe": set(), "jobs": set()}
"""Libraries don't import each other, but for these."""

INNER = {"_core", "_channel", "_runtime"}
"""Packages whose `__init__` is a docstring: there is no other way to their modules than their names."""

FACADE = {"L0", "L1", "L2", "L3", "L4"}
"""What the root's `__init__` exports from."""

L0_STDLIB = set(
    words("""__future__ abc builtins collections contextlib dataclasses datetime enum fractions functools hashlib inspect itertools
    keyword math numbers operator os random re reprlib statistics string textwrap types typing weakref""")
)
"""What makes values; nothing that waits, opens, or tells the time."""

IMPURE = set(
    words("""_thread asyncio concurrent mmap multiprocessing queue sched select selectors socket socketserver ssl subprocess threading
    time uvloop""")
)
"""What a state machine of L1 has no use for: bytes, events and the time are its arguments."""

PURE_NAMES = {("threading", "local")}
"""What such a module has that is no more than a variable: to be imported by name."""

OPTIONAL = {"aiohttp", "cloudpickle", "cupy", "numpy", "opentelemetry", "prometheus_client", "rich", "torch", "ucxx", "uvloop"}
"""What may be imported inside a function, because it may be missing or take long."""

TORCH_PACKAGES = {"tensor", "parallel"}
TORCH_MODULES = {"_channel.cuda", "_channel.tensors"}


@dataclass(frozen=True)
class Import:
    """One imported name: `base` is the module that the statement names, `module` the one it means, `name` what is taken from it."""

    line: int
    base: str
    module: str
    name: str
    in_function: bool


def imports_of(name: str, source: str, known: frozenset[str], *, package: bool = False) -> list[Import]:
    """Every import of a module, also those made by calling `import_module` or `__import__` with a literal."""
    found: list[Import] = []
    parent = name if package else name.rpartition(".")[0]

    def visit(node: ast.AST, in_function: bool) -> None:
        match node:
            case ast.Import():
                found.extend(Import(node.lineno, alias.name, alias.name, "", in_function) for alias in node.names)
            case ast.ImportFrom():
                base = node.module or ""
                if node.level:
                    above = parent.split(".")[: len(parent.split(".")) - node.level + 1]
                    base = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    found.append(Import(node.lineno, base, full if full in known else base, alias.name, in_function))
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(target)), *_]) if called in {
                "import_module",
                "__import__",
            }:
                found.append(Import(node.lineno, target, target, "", True))
        in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, in_function)

    visit(ast.parse(source), False)
    return found


def entry_of(module: str) -> str:
    """The entry of the table that a module stands under: ``monarch_async.tensor.comm`` → ``tensor``."""
    inner = module.removeprefix(ROOT).lstrip(".")
    first, _, rest = inner.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first in INNER and rest else first


def layer_of(entry: str) -> str | None:
    return next((layer for layer, entries in LAYERS.items() if entry in entries), None)


def may_import(importer: str, target: str) -> str:
    """Why one entry may not import another; empty if it may. Both are in the table, and they differ."""
    layer, below = layer_of(importer), layer_of(target)
    assert layer is not None
    assert below is not None
    if layer != below:
        if below in BELOW[layer] | MORE_BELOW.get(importer, set()):
            return ""
        return f"{importer} ({layer}) may not import {target} ({below}); allowed are {', '.join(sorted(BELOW[layer]))}"
    if layer == "L5":
        return "" if target in SIBLINGS[importer] else f"library {importer} may not import its sibling {target}"
    order = LAYERS[layer]
    if order.index(target) < order.index(importer):
        return ""
    return f"{target} stands after {importer} in {layer}: move one of them in LAYERS, or turn the dependency round"


def ancestors(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts))}


def check_module(name: str, source: str, known: frozenset[str], *, package: bool = False) -> Iterator[str]:
    """What is wrong with one module, one line each, with the line number in front."""
    if (lines := source.count("\n")) > MAX_LINES:
        yield f"{lines}: {name} has {lines} lines; a file has at most {MAX_LINES}, so split it by concept"
    entry = entry_of(name)
    layer = layer_of(entry)
    if layer is None and entry and entry not in INNER:
        yield f"1: {name} is in no layer: add {entry!r} to LAYERS in tests/meta/test_layering.py, after what it imports"
        return
    for item in imports_of(name, source, known, package=package):
        where, top = f"{item.line}: {name}", item.module.partition(".")[0]
        if item.in_function and top not in OPTIONAL and entry_of(item.module) not in TORCH_MODULES:
            yield f"{where} imports {item.module} inside a function; only optional packages may be"
        if top == "torch" and entry.partition(".")[0] not in TORCH_PACKAGES and entry not in TORCH_MODULES:
            yield f"{where} imports torch; only {', '.join(sorted(TORCH_PACKAGES | TORCH_MODULES))} may"
        if top != ROOT:
            if layer == "L0" and top not in L0_STDLIB:
                yield f"{where} imports {item.module}; L0 uses only {', '.join(sorted(L0_STDLIB))}"
            if layer == "L1" and top in IMPURE and (item.base, item.name) not in PURE_NAMES:
                yield f"{where} imports {item.module}; L1 is pure: bytes, events and the time are its arguments"
        elif item.base == name and package:
            pass  # `from monarch_async.tensor import comm` in its own __init__ names a module below it
        elif item.base in ancestors(name) or item.base == ROOT or (item.base == name and item.module == name):
            yield f"{where} imports from {item.base}, a package above it; write the module that has the name"
        elif entry in INNER:
            yield f"{where} imports {item.module}; the __init__ of {entry} is a docstring"
        elif item.module not in known:
            yield f"{where} imports {item.module}, which does not exist"
        elif entry == "":
            if layer_of(entry_of(item.module)) not in FACADE:
                yield f"{where} imports {item.module}; the root exports only from {', '.join(sorted(FACADE))}"
        elif entry_of(item.module) in INNER:
            yield f"{where} imports the package {item.module}; write the module that has the name"
        elif entry_of(item.module) != entry and layer_of(entry_of(item.module)) and (reason := may_import(entry, entry_of(item.module))):
            yield f"{where}: {reason}"


def check_circles(sources: Mapping[str, str], packages: frozenset[str]) -> Iterator[str]:
    """A circle of imports, named module by module."""
    known = frozenset(sources)
    graph = {
        name: {item.module for item in imports_of(name, source, known, package=name in packages) if item.module in known} - {name}
        for name, source in sources.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield f"modules import each other in a circle: {' → '.join(reversed(error.args[1]))}"


def read_sources() -> tuple[dict[str, str], frozenset[str]]:
    """Every module by its name, and which of them are packages."""
    sources, packages = {}, set()
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
        if parts[-1] == "__init__":
            packages.add(name)
    return sources, frozenset(packages)


SOURCES, PACKAGES = read_sources()


@pytest.mark.parametrize("name", SOURCES)
def test_module_keeps_its_layer(name: str) -> None:
    """Every module of the package imports only what its place in the table allows."""
    wrong = list(check_module(name, SOURCES[name], frozenset(SOURCES), package=name in PACKAGES))
    assert [] == wrong, "\n".join(wrong)


def test_no_circle_of_imports() -> None:
    """No module imports itself by way of others, whatever the layers say."""
    assert [] == list(check_circles(SOURCES, PACKAGES))


def test_table_is_consistent() -> None:
    """Nothing stands in two places, and every library is told which siblings it may use."""
    entries = [entry for layer in LAYERS.values() for entry in layer]
    assert sorted(set(entries)) == sorted(entries)
    assert set(LAYERS) == set(BELOW)
    assert set(LAYERS["L5"]) == set(SIBLINGS)


KNOWN = frozenset(
    f"{ROOT}.{name}"
    for name in words("""errors shape ids _core _core.framing _core.session _core.handshake _channel _channel.dial _runtime _runtime.link
    _runtime.cell actor mesh tensor tensor.comm tensor.ops parallel.plan testing.clock cli""")
) | {ROOT}


def found(module: str, source: str, *, package: bool = False) -> list[str]:
    name = f"{ROOT}.{module}" if module else ROOT
    return list(check_module(name, source, KNOWN, package=package))


PLANTED = {
    "a higher layer": ("_core.session", "from monarch_async._channel.dial import dial", "may not import _channel.dial"),
    "a higher layer, in a function": ("errors", "def f():\n    import monarch_async.actor", "may not import actor"),
    "a higher layer, for types only": ("errors", "if TYPE_CHECKING:\n    from monarch_async.actor import A", "may not import actor"),
    "a later module of its layer": ("_runtime.link", "from monarch_async._runtime.cell import Cell", "stands after"),
    "the root": ("actor", "from monarch_async import Actor", "a package above it"),
    "the root, plainly": ("actor", "import monarch_async", "a package above it"),
    "a module by way of the root": ("actor", "from monarch_async import errors", "a package above it"),
    "the root, from a sibling package": ("tensor.comm", "from monarch_async import Actor", "a package above it"),
    "its own package": ("_core.session", "from monarch_async._core import framing", "a package above it"),
    "its own package, relatively": ("_core.session", "from . import framing", "a package above it"),
    "the root, relatively": ("_core.session", "from .. import errors", "a package above it"),
    "an inner package as a whole": ("actor", "import monarch_async._core", "imports the package"),
    "a later module, relatively": ("_core.framing", "from .session import Session", "stands after"),
    "L0 with asyncio": ("errors", "import asyncio", "L0 uses only"),
    "L0 with the time": ("ids", "from time import monotonic", "L0 uses only"),
    "L0 with a package": ("shape", "import msgpack", "L0 uses only"),
    "L1 with a socket": ("_core.session", "import socket", "L1 is pure"),
    "L1 with threads": ("_core.session", "from threading import Thread", "L1 is pure"),
    "L1 with a part of asyncio": ("_core.session", "import asyncio.events", "L1 is pure"),
    "an import in a function": ("actor", "async def f():\n    import json", "inside a function"),
    "an import in a method": ("actor", "class A:\n    def f(self):\n        from json import loads", "inside a function"),
    "an import by name": ("actor", "importlib.import_module('json')", "inside a function"),
    "torch in the core": ("_core.session", "def f():\n    import torch", "imports torch"),
    "a part of torch in the API": ("mesh", "from torch.distributed import init", "imports torch"),
    "torch by name": ("mesh", "__import__('torch')", "imports torch"),
    "a sibling library": ("tensor.comm", "from monarch_async.testing.clock import Clock", "sibling testing"),
    "a library below its reach": ("tensor.comm", "from monarch_async._runtime.link import Link", "may not import _runtime.link"),
    "a tool with the runtime": ("cli", "import monarch_async._runtime.link", "may not import _runtime.link"),
    "the root with a library": ("", "from monarch_async.tensor import TensorActor", "the root exports only"),
    "an unknown module": ("gadget", "", "add 'gadget' to LAYERS in tests/meta/test_layering.py"),
    "an unknown inner module": ("_core.gadget", "", "add '_core.gadget' to LAYERS"),
    "a module that isn't there": ("actor", "from monarch_async.gone import x", "does not exist"),
    "a long file": ("actor", "x = 1\n" * 401, "has 401 lines"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_planted_violation_is_caught(case: str) -> None:
    """Each rule catches what it is there for, once, and says so."""
    module, source, message = PLANTED[case]
    wrong = found(module, source, package=module == "")
    assert [True] == [message in line for line in wrong if "inside a function" not in line or "inside" in message], wrong


def test_an_init_of_an_inner_package_imports_nothing() -> None:
    """`_core/__init__.py` re-exports nothing, so there is one way to each name."""
    assert ["1: monarch_async._core imports monarch_async.errors; the __init__ of _core is a docstring"] == found(
        "_core", "from monarch_async.errors import MonarchError", package=True
    )


ALLOWED = {
    "values": ("ids", "import os\nfrom monarch_async.errors import MonarchError"),
    "a variable per thread": ("_core.session", "from threading import local"),
    "a lower layer": ("_channel.dial", "import asyncio\nfrom monarch_async._core.framing import pack"),
    "an earlier module of its layer": ("_core.session", "from monarch_async._core.framing import pack"),
    "an earlier module, relatively": ("_core.session", "from .framing import pack"),
    "a module of a lower package": ("_runtime.link", "from monarch_async._core import framing"),
    "a longest file": ("actor", "x = 1\n" * 400),
    "torch where it belongs": ("tensor.comm", "import torch\nfrom monarch_async.tensor.ops import add"),
    "an optional package in a function": ("cli", "def main():\n    import rich.table"),
    "parallel on tensor": ("parallel.plan", "from monarch_async.tensor.comm import Comm"),
    "testing on the runtime": ("testing.clock", "from monarch_async._runtime.link import Link"),
    "a library's own front": ("tensor", "from monarch_async.tensor.comm import Comm"),
    "the root's front": ("", "from monarch_async.actor import Actor\nfrom monarch_async._runtime.cell import Cell"),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_allowed_is_not_called_a_violation(case: str) -> None:
    """The rules let pass what the layer table allows."""
    module, source = ALLOWED[case]
    assert [] == found(module, source, package=module in {"", "tensor"})


def test_a_circle_is_named() -> None:
    """Modules of one package that import each other in a circle are found, and listed in import order."""
    follows = {"one": "two", "two": "three", "three": "one"}
    sources = {f"{ROOT}.tensor.{name}": f"from {ROOT}.tensor.{after} import x" for name, after in follows.items()}
    (circle,) = check_circles(sources, frozenset())
    path = [name.rpartition(".")[2] for name in circle.partition(": ")[2].split(" → ")]
    assert 4 == len(path)
    assert follows == dict(itertools.pairwise(path))
