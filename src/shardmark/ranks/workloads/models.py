"""Names of classification models, found without importing torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from shardmark.base.system.extras import install_command, is_installed
from shardmark.base.system.modules import find_without_import, looked_in

MODELS: dict[str, str] = {
    "resnet18": "residual network, 11.7 M parameters (He et al., 2016)",
    "resnet50": "residual network with bottlenecks, 25.6 M parameters (He et al., 2016)",
    "mobilenet_v2": "inverted residuals, 3.5 M parameters (Sandler et al., 2018)",
    "vit_cifar": "small vision transformer for 32 x 32 images, 3.2 M parameters",
    "vit_digits": "smaller vision transformer for digits of 8 x 8, 0.9 M parameters",
    "vit_b_16": "vision transformer, 86.6 M parameters (Dosovitskiy et al., 2021)",
    "vgg16": "plain convolutions, 138 M parameters (Simonyan and Zisserman, 2015)",
    "efficientnet_v2_s": "EfficientNetV2 small, 21.5 M parameters (Tan and Le, 2021)",
    "efficientnet_v2_m": "EfficientNetV2 medium, 54.1 M parameters (Tan and Le, 2021)",
    "efficientnet_v2_l": "EfficientNetV2 large, 119 M parameters (Tan and Le, 2021)",
    "convnext_large": "ConvNeXt large, 198 M parameters (Liu et al., 2022)",
    "densenet121": "densely connected layers, 8.0 M parameters (Huang et al., 2017)",
}
"""Name -> one line (parameters with 1,000 classes, those of `SMALL_VITS` with 10)."""
SMALL_VITS = {
    "vit_cifar": {"num_layers": 6, "hidden_dim": 256, "mlp_dim": 512},
    "vit_digits": {"num_layers": 3, "hidden_dim": 192, "mlp_dim": 384},
}

OTHER_MODELS: dict[str, str] = {
    "any other torchvision name": "every classification model of torchvision.models",
    "timm:NAME": "every model of timm, where installed; the bare name too, if only timm has it",
    "package.module:function": "your own, or folder/file.py:function: called with num_classes=N and"
    " model_options",
}
"""Forms of names for models outside the table, one line each for `list models`."""

_USER_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_FILE_FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")
_SETS_ATTRIBUTES = frozenset({"setattr", "__setattr__", "__getattr__", "__dict__", "vars"})
"""Names in the source of a class that may define methods which the source does not show."""
_REGISTERED = re.compile(r"^@register_model\b(\([^)]*\))?\s*\n(?:.*\n)*?def (\w+)\(", re.MULTILINE)


def is_user_function(name: str) -> bool:
    """True for names of the form `package.module:function` or `folder/file.py:function`."""
    forms = (_USER_FUNCTION, _FILE_FUNCTION)
    return not name.startswith(("timm:", "hf:")) and any(form.fullmatch(name) for form in forms)


def model_known(name: str) -> bool:
    """True if the model can be built here; a user's function is looked up in its source."""
    if is_user_function(name):
        return user_function_problem(name) is None
    if name.startswith("timm:"):
        return _timm_base(name) in registered_names("timm")
    if name in MODELS or name in registered_names("torchvision"):
        return True
    return _timm_base(name) in registered_names("timm")


def check_model_name(name: str) -> None:
    """Raise `ValueError` with the problem and the nearest names, unless the name is valid."""
    if model_known(name):
        return
    if is_user_function(name):
        raise ValueError(f"model {name!r}: {user_function_problem(name)}")
    check_function_spelling(name)
    library = "timm" if name.startswith("timm:") else "torchvision"
    if not is_installed(library):
        command = install_command(library)
        raise ValueError(f"model {name!r}: {library} is not installed; {command}")
    candidates = sorted({*MODELS, *registered_names("torchvision")})
    if name.startswith("timm:"):
        candidates = [f"timm:{other}" for other in sorted(registered_names("timm"))]
    nearest = get_close_matches(name.lower(), candidates, n=3) or list(MODELS)
    raise ValueError(
        f"unknown model {name!r}; nearest: {', '.join(nearest)}; "
        "`shardmark list models` says what else there is"
    )


def only_in_timm(name: str) -> bool:
    """Return whether a known model comes from timm and not from torchvision."""
    in_torchvision = name in MODELS or name in registered_names("torchvision")
    return name.startswith("timm:") or not in_torchvision


def check_function_spelling(name: str) -> None:
    """Raise `ValueError` for `my_models.cnn` if the user's function is `my_models:cnn`."""
    module, _, function = name.rpartition(".")
    if is_user_function(f"{module}:{function}") and model_known(f"{module}:{function}"):
        raise ValueError(f"unknown model {name!r}; did you mean {module}:{function}?")


@cache
def registered_names(library: str) -> frozenset[str]:
    """Names that the installed library registers, read from its source; empty if not installed."""
    spec = find_spec(library)
    if spec is None or spec.origin is None:
        return frozenset()
    names: set[str] = set()
    for path in sorted((Path(spec.origin).parent / "models").glob("[!_]*.py")):
        for argument, function in _REGISTERED.findall(path.read_text(encoding="utf-8")):
            registered = re.search(r"[\"'](\w+)[\"']", argument)
            names.add(registered[1] if registered else function)
    return frozenset(names)


def _timm_base(name: str) -> str:
    """The name without the tag of pretrained weights, as in `resnet50.a1_in1k`."""
    return name.removeprefix("timm:").partition(".")[0]


def user_function_problem(name: str, methods: Collection[str] = ()) -> str | None:
    """Problem of the user's function, or class with these methods, by its source, or None."""
    function = name.rpartition(":")[2]
    origin, problem = _source_of(name)
    if problem is not None or origin is None:
        return problem
    try:
        tree = ast.parse(Path(origin).read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        return f"{origin} is not valid Python source: {error}"
    names = _bound_names(tree)
    if function not in names and names.isdisjoint(("*", "__getattr__")):
        defined = [n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        by_case = {name.lower(): name for name in defined}
        nearest = [by_case[n] for n in get_close_matches(function.lower(), by_case, n=1)]
        available = f"it has {', '.join(defined) or 'no functions or classes'}"
        return f"{origin} has no {function!r}; {f'nearest: {nearest[0]}' if nearest else available}"
    missing = ", ".join(_missing_methods(tree, function, methods))
    required = ", ".join(methods)
    return f"{origin}: class {function} has no {missing}; required: {required}" if missing else None


def _source_of(name: str) -> tuple[str | None, str | None]:
    """Return the Python file of a user's function, None for a compiled module, and a problem."""
    module = name.rpartition(":")[0]
    if module.endswith(".py"):
        file = Path(module).expanduser()
        return str(file), None if file.is_file() else f"no file {module!r}{looked_in(module)}"
    spec = find_without_import(module)
    if spec is None:
        return None, f"no module {module!r} is installed or exists{looked_in(module)}"
    is_source = spec.origin is not None and spec.origin.endswith(".py")
    return (spec.origin if is_source else None), None


def user_definition(name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """Return the definition of a user's class or function; None if no source has it."""
    origin, problem = _source_of(name)
    if origin is None or problem is not None:
        return None
    try:
        tree = ast.parse(Path(origin).read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # `user_function_problem` reports it
        return None
    function = name.rpartition(":")[2]
    definitions = (n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef))
    return next((node for node in definitions if node.name == function), None)


def _missing_methods(tree: ast.Module, name: str, methods: Collection[str]) -> list[str]:
    """Required methods that the class lacks; empty if it may get them in another way."""
    classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    if len(classes) != 1 or classes[0].bases or classes[0].keywords or classes[0].decorator_list:
        return []
    inside = list(ast.walk(classes[0]))
    attributes = [node for node in inside if isinstance(node, ast.Attribute)]
    available = _bound_names(classes[0])
    used = {node.id for node in inside if isinstance(node, ast.Name)}
    used |= {node.attr for node in attributes}
    if not _SETS_ATTRIBUTES.isdisjoint(available | used):
        return []
    available |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    return [method for method in methods if method not in available]


def _bound_names(tree: ast.AST) -> set[str]:
    """Names that the tree binds, and `*` if it imports everything from a module."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
