"""Reading profiles: by the name of a bundled one, or by the path of a user's own file.

All faults of a file are reported at once, each with its place.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from shared.errors import ConfigError
from shared.undecodable import UNPARSABLE
from thermocline.simulate.profiles import hardware_profile, model_profile
from thermocline.simulate.profiles.hardware_profile import HardwareProfile
from thermocline.simulate.profiles.model_profile import ModelProfile

T = TypeVar("T", bound=msgspec.Struct)

_HERE = Path(__file__).parent
_HARDWARE = _HERE / "hardware"
_MODELS = _HERE / "models"


def hardware_names() -> list[str]:
    """Return the sorted names of the bundled hardware profiles."""
    return _names(_HARDWARE)


def model_names() -> list[str]:
    """Return the sorted names of the bundled model profiles."""
    return _names(_MODELS)


def load_hardware(name_or_path: str) -> HardwareProfile:
    """Load a hardware profile by name or path. Raises ConfigError with every fault, or the known names."""
    return _load(name_or_path, _HARDWARE, "hardware", HardwareProfile, hardware_profile.contradictions)


def load_model(name_or_path: str) -> ModelProfile:
    """Load a model profile by name or path. Raises ConfigError with every fault, or the known names."""
    return _load(name_or_path, _MODELS, "model", ModelProfile, model_profile.contradictions)


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def _load(name_or_path: str, folder: Path, kind: str, struct: type[T], contradictions: Callable[[T], list[str]]) -> T:
    known = _names(folder)
    if name_or_path in known:
        path = folder / f"{name_or_path}.toml"
    elif name_or_path.endswith(".toml") or "/" in name_or_path:
        path = Path(name_or_path)
    else:
        raise ConfigError(
            f"there is no {kind} profile {name_or_path!r}; known are {', '.join(known)}, or a path that ends in .toml"
        )
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {kind} profile {path}: {error.strerror}") from error
    except UNPARSABLE as error:
        raise ConfigError(f"{kind} profile {path} is no TOML: {error}") from error
    faults = _faults(document, struct, "")
    if not faults:
        profile = msgspec.convert(document, struct)
        faults = contradictions(profile)
        if not faults:
            return profile
    raise ConfigError(f"{kind} profile {path}: " + "; ".join(faults))


def _faults(document: Mapping[str, Any], struct: type[msgspec.Struct], prefix: str) -> list[str]:
    """Return a fault for each missing, unknown or malformed field, those of sections included."""
    hints = get_type_hints(struct, include_extras=True)
    optional = {field.name for field in msgspec.structs.fields(struct) if not field.required}
    faults = [f"{prefix}{name}: unknown field" for name in document if name not in hints]
    for name, kind in hints.items():
        if name not in document:
            faults += [] if name in optional else [f"{prefix}{name}: missing"]
            continue
        value = document[name]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if isinstance(value, Mapping):
                faults += _faults(value, kind, f"{prefix}{name}.")
            else:
                faults.append(f"{prefix}{name}: must be a section")
            continue
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            faults.append(f"{prefix}{name}: {error}")
    return faults
