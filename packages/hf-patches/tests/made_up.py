"""A language model whose code lies beside its checkpoint, with a switch for each mistake that packing would expose.

`test_auto.py` copies this file into a checkpoint, from which transformers loads it with `trust_remote_code=True`.
"""

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class MadeUpConfig(PreTrainedConfig):
    model_type = "made_up"

    def __init__(self, flaw="", num_hidden_layers=5, sliding_window=32, logit_scale=0.7, **kwargs):
        self.vocab_size, self.hidden_size, self.num_attention_heads = 61, 32, 4
        self.num_hidden_layers, self.sliding_window, self.logit_scale = num_hidden_layers, sliding_window, logit_scale
        self.flaw = flaw
        super().__init__(**kwargs)


def attend(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    scores = query @ key.transpose(2, 3) * scaling + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


class MadeUpAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.head_dim = config, config.hidden_size // config.num_attention_heads
        self.layer_idx = 0 if config.flaw == "cache" else layer_idx
        self.is_causal = True
        self.sliding_window = config.sliding_window if layer_idx % 2 else None
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden, masks, **kwargs):
        query, key, value = self.qkv(hidden).view(*hidden.shape[:2], 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attend)
        if self.config.flaw != "window":
            kwargs["sliding_window"] = self.sliding_window
        if self.config.flaw == "bias":
            kwargs["attention_bias"] = query.sum()
        mask = masks[self.sliding_window is not None]
        output, _ = function(self, query, key, value, mask, scaling=self.head_dim**-0.5, **kwargs)
        return self.out(output.flatten(2))


class MadeUpLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.flaw = config.flaw
        self.norm, self.norm2 = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)
        self.attention = MadeUpAttention(config, layer_idx)
        self.up, self.down = nn.Linear(config.hidden_size, 48), nn.Linear(48, config.hidden_size)

    def forward(self, hidden, masks, **kwargs):
        hidden = hidden + self.attention(self.norm(hidden), masks, **kwargs)
        if self.flaw == "mixes":  # each token sees the one before it in the row
            hidden = hidden + 0.1 * hidden.roll(1, dims=1) * (torch.arange(hidden.shape[1]) > 0)[:, None]
        if self.flaw == "batch":
            hidden = hidden - hidden.mean(dim=(0, 1)).detach()
        if self.flaw == "gradient":  # larger in longer rows
            hidden = hidden + 0.01 * hidden.shape[1] * (hidden - hidden.detach())
        return hidden + self.down(self.up(self.norm2(hidden)).relu())


class MadeUpPreTrainedModel(PreTrainedModel):
    config_class = MadeUpConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def _init_weights(self, module):
        pass


class MadeUpModel(MadeUpPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(512, config.hidden_size)
        self.blocks = nn.ModuleList(MadeUpLayer(config, number) for number in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
        hidden = self.embed(input_ids)
        if position_ids is None or self.config.flaw == "positions":
            position_ids = torch.arange(hidden.shape[1])[None]
        hidden = hidden + self.places(position_ids)
        masks = [None, None]
        if self.config._attn_implementation == "eager":
            given = dict(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask, past_key_values=None)
            masks = [make(**given) for make in (create_causal_mask, create_sliding_window_causal_mask)]
        kwargs.pop("use_cache", None)
        for block in self.blocks:
            hidden = block(hidden, masks, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=hidden)


class MadeUpForCausalLM(MadeUpPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = MadeUpModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, return_dict=None, **kwargs):
        hidden = self.model(input_ids, attention_mask, position_ids, **kwargs).last_hidden_state
        logits = self.head(hidden) * self.config.logit_scale
        if self.config.flaw == "head":
            logits = logits.sin()
        return CausalLMOutputWithPast(logits=logits)
