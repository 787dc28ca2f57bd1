"""What proposes tokens. `decode` knows the protocol only; `generate` chooses."""

from selfspec.drafters.base import Draft, Drafter, NoDrafter
from selfspec.drafters.exit import ExitDrafter

__all__ = ["Draft", "Drafter", "ExitDrafter", "NoDrafter"]
