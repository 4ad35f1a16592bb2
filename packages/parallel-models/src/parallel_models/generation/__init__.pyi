from parallel_models.generation.continuous_batching import Responses as Responses
from parallel_models.generation.draw import Prompt as Prompt, draw_responses as draw_responses
from parallel_models.generation.options import require_drafts as require_drafts
from parallel_models.generation.prefix_affinity import PrefixAffinity as PrefixAffinity
from parallel_models.generation.session import STEPS as STEPS, end_sessions as end_sessions
from parallel_models.generation.stream import ResponseStream as ResponseStream
