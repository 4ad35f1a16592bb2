from rl_train.data.codec import TextCodec as TextCodec
