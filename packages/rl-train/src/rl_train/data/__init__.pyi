from rl_train.data.codec import TextCodec as TextCodec
from rl_train.data.images import _processor as _processor
