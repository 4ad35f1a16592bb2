from parallel_models.generation.continuous_batching import STEPS as STEPS, Responses as Responses
from parallel_models.generation.draw import Prompt as Prompt, draw_responses as draw_responses
