"""`builtin:arithmetic`: a small language model that half knows how to add, made here in about a minute.

It exists so that a run can be tried, tested and demonstrated on any machine without a download. A Llama-shaped network is
first taught sums of one-digit numbers in reasoning-gym's own words, then shown answers of which most are wrong in various ways.
The result knows the right answer but often gives another, which is what reinforcement learning is good at repairing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agents.rollout.environments import open_environment
from whimbrel.spec import EnvironmentSpec

SEED: Final = 20_260
TASK: Final = EnvironmentSpec(
    task="chain_sum", params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
)
VOCABULARY: Final = 512
PAD, END, ANSWER = "<|pad|>", "<|end|>", "<|answer|>"
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|answer|>{% endif %}"
)
BATCH: Final = 64
LEARN_STEPS: Final = 210
"""Steps on right answers; the task is known long before."""
SPOIL_STEPS: Final = 40
"""Steps on mostly wrong answers, so that the policy starts unsure."""
RIGHT_SHARE: Final = 0.3
"""Right answers among those of the second part."""
LEARNING_RATE: Final = 1e-3

Tell = Callable[[str], None]


def build(directory: Path, tell: Tell) -> None:
    """Write config, tokenizer and bf16 weights into `directory`; deterministic on one machine and torch release."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tell("making the tokenizer")
    tokenizer = make_tokenizer()
    model = LlamaForCausalLM(make_config(tokenizer))
    model.float()
    tell(f"made a model of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters")
    supervise(model, tokenizer, tell)
    model.bfloat16()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_token(tokenizer, END),
        pad_token_id=_token(tokenizer, PAD),
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose pieces may span words, each digit by itself: the task's fixed phrases become single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END, ANSWER],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        max_token_length=80,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE, model_max_length=1024
    )


def _corpus() -> Iterator[str]:
    for task in ("chain_sum", "basic_arithmetic", "products", "gcd", "lcm", "letter_counting", "spell_backward"):
        environment = open_environment(EnvironmentSpec(task=task), SEED)
        for index in range(60):
            prompt = environment.prompt(index)
            yield prompt.text
            yield prompt.answer


def _token(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    found = tokenizer.convert_tokens_to_ids(text)
    assert isinstance(found, int), f"{text} is one token"
    return found


def supervise(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tell: Tell) -> None:
    """Teach the task, then make the policy unsure of it."""
    environment = open_environment(TASK, SEED)
    chance = random.Random(SEED)  # noqa: S311 -- training data, not secrets
    prompts = [environment.prompt(index) for index in range(2_000)]
    encoded = [
        tokenizer.apply_chat_template(p.messages, add_generation_prompt=True, return_dict=False) for p in prompts
    ]
    pad, end = _token(tokenizer, PAD), _token(tokenizer, END)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    started, total = time.monotonic(), LEARN_STEPS + SPOIL_STEPS
    model.train()
    for step in range(total):
        spoil = step >= LEARN_STEPS
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * (0.3 if spoil else 1.0)
        rows = []
        for choice in chance.choices(range(len(prompts)), k=BATCH):
            right = prompts[choice].answer
            answer = right if not spoil or chance.random() < RIGHT_SHARE else wrong_answer(int(right), chance)
            rows.append((encoded[choice], [*tokenizer.encode(answer), end]))
        loss = _loss(model, rows, pad)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            tell(f"step {step + 1} of {total}: loss {loss.item():.3f}, {time.monotonic() - started:.0f} s")
    model.eval()


def wrong_answer(right: int, chance: random.Random) -> str:
    """One of several kinds of mistake: off by a little, wrong sign, digits turned round or repeated, no number at all."""
    kind = chance.random()
    if kind < 0.5 or right == 0:  # 0 has no other sign, and its digits repeated are 0 again
        return str(right + chance.choice([-3, -2, -1, 1, 2, 3]))
    if kind < 0.65:
        return str(-right)
    if kind < 0.8:
        return str(right)[::-1] + "5"
    if kind < 0.9:
        return str(right) * 2
    return chance.choice(["", "=", "one", "+"])


def _loss(model: LlamaForCausalLM, rows: list[tuple[list[int], list[int]]], pad: int) -> torch.Tensor:
    """Cross entropy of the answers only, rows padded on the right."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.full((len(rows), width), pad)
    targets = torch.full((len(rows), width), -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor([*prompt, *answer])
        targets[row, len(prompt) - 1 : end - 1] = torch.tensor(answer)
    logits = model(tokens).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
