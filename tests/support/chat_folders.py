"""Small model folders with tokenizers of several kinds and chat templates in the style of published models."""

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "What is 2 + 3? The answer is 5. ",
    "naïve ∑ x\n\n  y",
    "def f(a): return a\n",
    "user assistant system",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{%- endif %}" + CHATML
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GLM = (
    "[gMASK]<sop>{%- for m in messages %}{%- if m.role == 'assistant' %}<|assistant|>\n<think></think>\n"
    "{{ m.content.split('</think>')[-1].strip() }}{%- elif m.role == 'tool' %}<|observation|>\n<tool_response>\n"
    "{{ m.content }}\n</tool_response>{%- else %}<|{{ m.role }}|>\n{{ m.content }}{%- endif %}{%- endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think>{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content %}{%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
STYLES = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>")),
    "default system": (DEFAULT_SYSTEM, ("<|im_start|>", "<|im_end|>")),
    "llama3": (LLAMA3, ("<|start_header_id|>", "<|eot_id|>", "<|end_header_id|>", "<|eom_id|>")),
    "glm": (GLM, ("[gMASK]", "<|user|>", "<sop>", "<|assistant|>", "<|system|>", "<|observation|>")),
    "deepseek": (DEEPSEEK, ("<｜User｜>", "<｜end▁of▁sentence｜>", "<｜Assistant｜>")),
    "qwen3": (QWEN3, ("<|im_start|>", "<|im_end|>")),
    "mistral": (MISTRAL, ("[INST]", "</s>", "[/INST]")),
    "thinking": (THINKING, ("<|im_start|>", "<|im_end|>")),
}
"""Templates, and their control words, of which the second ends answers."""


def byte_level():
    library = Tokenizer(models.BPE())
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(TEXTS * 3, trainer)
    return library


def sentence_pieces():
    """A BPE of pieces as Llama 2 has: spaces are ▁, one is put before a text, other characters are their bytes."""
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [*map(chr, range(33, 127)), "▁"]
    merged = ["▁i", "▁t", "▁a", "er", "▁is", "</", "s>"]
    merges = [("▁", "i"), ("▁", "t"), ("▁", "a"), ("e", "r"), ("▁i", "s"), ("<", "/"), ("s", ">")]
    vocabulary = {piece: number for number, piece in enumerate([*first, *letters, *merged])}
    library = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return library


def unigram():
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -3.0), ("▁is", -2.0), ("▁t", -2.5)]
    pieces += [(chr(code), -5.0) for code in range(33, 127)] + [("\n", -5.0)]
    library = Tokenizer(models.Unigram(pieces, unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.decoder = decoders.Metaspace(prepend_scheme="first")
    return library


LIBRARIES = {"bytes": byte_level, "pieces": sentence_pieces, "unigram": unigram}


def make(folder, style="chatml", library=None, tags_special=False, settings=None, config=None, template=None):
    """Makes a folder whose tokenizer knows the style's control words, and TAGS as special tokens or as plain ones."""
    folder = Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    source, words = STYLES[style]
    library = LIBRARIES[library]() if isinstance(library, str) else library or byte_level()
    special = ["<s>", "</s>", "<|endoftext|>", *(word for word in words if word != "</s>")]
    library.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    library.add_tokens([AddedToken(word, special=tags_special, normalized=False) for word in TAGS])
    library.save(str(folder / "tokenizer.json"))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": words[1]}
    own |= {"pad_token": "<|endoftext|>", "chat_template": source if template is None else template}
    own |= settings or {}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in own.items() if v is not None}))
    size = library.get_vocab_size()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": size} | (config or {})))
    return folder


def reference(folder):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def beginning(library):
    """Gives every text that is tokenized without a template a first token."""
    library.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    return library
