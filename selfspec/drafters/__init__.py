"""What proposes tokens. `decode` knows the protocol only; `generate` chooses."""

from selfspec.drafters.base import Draft, Drafter, NoDrafter
from selfspec.drafters.exit import ExitDrafter, known_deep

__all__ = ["Draft", "Drafter", "ExitDrafter", "NoDrafter", "known_deep"]
