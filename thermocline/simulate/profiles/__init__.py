"""Profiles of hardware and models, as TOML files: bundled ones, or a user's own by path."""

from thermocline.simulate.profiles.files import hardware_names, load_hardware, load_model, model_names
from thermocline.simulate.profiles.hardware_profile import HardwareProfile
from thermocline.simulate.profiles.model_profile import ModelProfile

__all__ = ["HardwareProfile", "ModelProfile", "hardware_names", "load_hardware", "load_model", "model_names"]
