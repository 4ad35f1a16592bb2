"""The endpoint of a run: programs that speak OpenAI's protocol draw from the policy, and every token is recorded."""

from parallel_layers.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)
