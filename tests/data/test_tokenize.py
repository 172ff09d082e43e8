from __future__ import annotations

import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from byte_tokenizer import CHATML, byte_tokenizer
from fedloom.data.sources import Example, conversation
from fedloom.data.tokenize import (
    Encoded,
    collate,
    encode,
    encode_prompt,
    end_token_id,
    prompt_text,
    stop_tokens,
    template_kind,
    tokenizer_hash,
)
from fedloom.errors import BackboneError, DataError

BOS_CHATML = "{{ bos_token }}" + CHATML
CHAT = {"bos_token": None, "eos_token": "<|im_end|>"}
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML


def byte_ids(tokenizer, text):
    """Ids of plain text by the definition of the tokenizer: one a byte."""
    (symbols, _), *_ = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [tokenizer.convert_tokens_to_ids(symbol) for symbol in symbols]


def example(prompt="Hi", response="Yo"):
    return Example(conversation(prompt, response))


def test_chat_template_golden():
    tokenizer = byte_tokenizer(CHATML, **CHAT)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    (item,), report = encode([example()], tokenizer)
    newline = byte_ids(tokenizer, "\n")
    prompt = [
        start, *byte_ids(tokenizer, "user"), *newline, *byte_ids(tokenizer, "Hi"), end, *newline,
        start, *byte_ids(tokenizer, "assistant"), *newline,
    ]  # fmt: skip
    assert item == Encoded((*prompt, *byte_ids(tokenizer, "Yo"), end), len(prompt), 0)
    assert encode_prompt([("user", "Hi")], tokenizer) == prompt
    assert (report.template, report.kept) == ("chat", 1)


def test_d7_no_chat_template_gives_the_plain_one_and_says_so():
    tokenizer = byte_tokenizer()
    assert template_kind(tokenizer) == "plain"
    turns = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Yo"), ("user", "Bye")]
    assert prompt_text(turns, tokenizer) == (
        "Be kind.\n\n### Instruction:\nHi\n\n### Response:\nYo\n\n### Instruction:\nBye\n\n### Response:\n"
    )
    (item,), report = encode([example()], tokenizer)
    assert tokenizer.decode(item.ids) == "### Instruction:\nHi\n\n### Response:\nYo</s>"
    assert tokenizer.decode(item.ids[item.prompt_length :]) == "Yo</s>"
    assert report.summary() == "1 examples; plain template (no chat template)"


@pytest.mark.parametrize("adds_bos", [False, True], ids=["tokenizer-adds-none", "tokenizer-adds-bos"])
@pytest.mark.parametrize("template", [None, CHATML, BOS_CHATML], ids=["plain", "chat", "chat-writes-bos"])
def test_d6_exactly_one_bos(template, adds_bos):
    tokenizer = byte_tokenizer(template, adds_bos=adds_bos, bos_token="<s>")
    (item,), _ = encode([example()], tokenizer)
    prompt = encode_prompt([("user", "Hi")], tokenizer)
    for ids in (list(item.ids), prompt):
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1
    assert list(item.ids[: item.prompt_length]) == prompt
    assert tokenizer.decode(item.ids[item.prompt_length :]) == ("Yo</s>" if template is None else "Yo<|im_end|>")


def test_d6_a_bos_that_also_opens_every_turn_stays_in_place():
    # SmolLM2: BOS is <|im_start|>, which the template writes before each message.
    tokenizer = byte_tokenizer(CHATML, bos_token="<|im_start|>", eos_token="<|im_end|>")
    ids = encode_prompt([("user", "Hi")], tokenizer)
    assert tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("template", [None, CHATML], ids=["plain", "chat"])
def test_d5_eos_is_a_label_also_when_it_is_the_padding_token(template):
    eos = "</s>" if template is None else "<|im_end|>"
    tokenizer = byte_tokenizer(template, eos_token=eos, pad_token=eos)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    encoded, _ = encode([example("Hi", "Yo"), example("Hi", "A longer one")], tokenizer)
    batch = collate(encoded, tokenizer.pad_token_id)
    labels = [batch.labels[batch.rows == b].tolist() for b in range(2)]
    assert [tokenizer.decode(ids) for ids in labels] == ["Yo" + eos, "A longer one" + eos]
    assert batch.ids[0, batch.lengths[0] - 1] == tokenizer.eos_token_id


def test_d5_the_turn_end_of_the_template_wins_over_eos():
    tokenizer = byte_tokenizer(CHATML, eos_token="</s>")
    assert end_token_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    bare = byte_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}", eos_token="</s>")
    assert end_token_id(bare) == tokenizer.convert_tokens_to_ids("</s>")


def test_d5_no_end_token_at_all_is_an_error():
    with pytest.raises(BackboneError, match="no end-of-sequence token"):
        encode([example()], byte_tokenizer(eos_token=None))


def test_d3_prompt_that_fills_the_maximum_is_left_out_with_a_count():
    tokenizer = byte_tokenizer(CHATML, **CHAT)
    frame = len(encode_prompt([("user", "")], tokenizer))
    examples = [example("x" * n, "Yo") for n in (0, 17, 18, 19, 20, 21)]
    encoded, report = encode(examples, tokenizer, max_length=frame + 20)
    # room left: 20, 3, 2, 1, 0, −1 ids for "Yo" and its end token
    assert [item.index for item in encoded] == [0, 1, 2, 3]
    assert [len(item.ids) - item.prompt_length for item in encoded] == [3, 3, 2, 1]
    assert (report.kept, report.no_label_left, report.truncated) == (4, 2, 2)
    end = tokenizer.eos_token_id
    assert [item.ids[-1] == end for item in encoded] == [True, True, False, False]
    assert report.summary() == (
        f"4 examples, 2 left out because the prompt fills {frame + 20} tokens, 2 responses cut at {frame + 20} tokens; "
        "the tokenizer's chat template"
    )
    # no example without a label gets through, so the loss of a batch is a mean over at least one label of each
    batch = collate(encoded, tokenizer.pad_token_id)
    assert torch.bincount(batch.rows).tolist() == [3, 3, 2, 1]


def test_d3_and_d1_are_errors_when_strict():
    tokenizer = byte_tokenizer()
    long = Example(conversation("x" * 600, "y"), source="site.jsonl", row=4)
    with pytest.raises(DataError, match=r"example 2 \(site\.jsonl, row 5\) has no label: its prompt has 633 tokens"):
        encode([example(), long], tokenizer, strict=True)
    with pytest.raises(DataError, match="example 1 has no label: its response is empty"):
        encode([example("x", "")], tokenizer, strict=True)


def test_d1_empty_response_is_counted():
    encoded, report = encode([example("x", ""), example()], byte_tokenizer())
    assert [item.index for item in encoded] == [1]
    assert (report.kept, report.empty_response) == (1, 1)
    assert encode([], byte_tokenizer())[1].kept == 0


def test_d8_every_character_survives():
    text = "“it’s” 👍🏽 مرحبا שלום \0 a\u2028b\r\n"
    for template in (None, CHATML):
        tokenizer = byte_tokenizer(template)
        (item,), _ = encode([example(text, text)], tokenizer)
        assert tokenizer.decode(item.ids[item.prompt_length : -1]) == text
        assert text in tokenizer.decode(item.ids[: item.prompt_length])


def test_a_template_that_refuses_a_role_says_what_to_do():
    with pytest.raises(DataError, match=r"refuses messages with the roles system, user: no system role.*first user"):
        encode_prompt([("system", "s"), ("user", "u")], byte_tokenizer(NO_SYSTEM))


def test_collate_golden():
    batch = collate([Encoded((5, 6, 7, 8), 2, 4), Encoded((9, 3), 1, 0)], pad_id=0)
    assert batch.ids.tolist() == [[5, 6, 7, 8], [9, 3, 0, 0]]
    assert batch.lengths.tolist() == [4, 2]
    assert [t.tolist() for t in batch.positions] == [[0, 0, 1], [1, 2, 0]]
    assert batch.labels.tolist() == [7, 8, 3]
    assert batch.index.tolist() == [4, 0]
    assert {t.dtype for t in vars(batch.to("cpu")).values()} == {torch.int64}
    with pytest.raises(DataError, match="at least one example"):
        collate([], pad_id=0)


def test_loss_at_the_positions_is_the_usual_shifted_masked_loss():
    from transformers.loss.loss_utils import ForCausalLMLoss

    tokenizer = byte_tokenizer(CHATML, **CHAT)
    encoded, _ = encode([example("Hi", "Yo"), example("A longer one", "B"), example("C", "Some more")], tokenizer)
    batch = collate(encoded, tokenizer.pad_token_id)
    logits = torch.randn(*batch.ids.shape, len(tokenizer), generator=torch.Generator().manual_seed(0))
    masked = batch.ids.clone()
    for b, item in enumerate(encoded):
        masked[b, : item.prompt_length] = -100
        masked[b, len(item.ids) :] = -100
    ours = torch.nn.functional.cross_entropy(logits[batch.positions], batch.labels)
    torch.testing.assert_close(ours, ForCausalLMLoss(logits, masked, vocab_size=len(tokenizer)))


def test_hash_is_of_what_decides_the_ids():
    tokenizer = byte_tokenizer(CHATML)
    first = tokenizer_hash(tokenizer)
    assert first == tokenizer_hash(byte_tokenizer(CHATML))
    tokenizer(["a", "bb"], padding=True, truncation=True, max_length=4)  # leaves its settings in the backend
    assert tokenizer_hash(tokenizer) == first
    others = [byte_tokenizer(), byte_tokenizer(CHATML, eos_token="<|im_end|>"), byte_tokenizer(CHATML, adds_bos=True)]
    assert len({first, *map(tokenizer_hash, others)}) == 4


def test_an_untrained_model_may_also_end_with_its_own_end_of_sequence() -> None:
    """A base model with a chat template (Qwen2.5): the template ends in one token, the model in another."""
    assert stop_tokens(byte_tokenizer(CHATML)) == [257, 259]  # </s> and <|im_end|>
    assert stop_tokens(byte_tokenizer()) == [257]
