from rl_train.data.codec import TextCodec as TextCodec
from rl_train.data.prompts import Prompt as Prompt
