"""Where we run: what this machine can do (`doctor`) and what a measurement must say about it (`device`)."""

from __future__ import annotations

from mok.session.device import device_facts
from mok.session.doctor import Capability, capabilities

__all__ = ["Capability", "capabilities", "device_facts"]
