"""Messages to tokens: lossless, append-only, and refused where a template rewrites history."""

import hashlib
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tasks.policy import make_tokenizer
from tasks.renderers import Renderer

PROBLEMS = [f"Calculate {a} + {b}." for a in range(40) for b in range(0, 100, 7)]
TEXTS = [
    "34",
    "Calculate 34 + 57.",
    " a\n\tb ",
    "Größe: 3,5 µm",
    "数学 ∑ 🧮",
    "e\u0301",
    "",
    "\x00\x7f",
]

CHATML = (
    "{% for message in messages %}<|user|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
FORGETS_OLD_ANSWERS = (
    "{% for message in messages %}{% if loop.last or message['role'] == 'user' %}"
    "<|user|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ENDS_NO_ANSWER = (
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}> {% endif %}"
)


def save(folder: Path, template: str | None = None) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(PROBLEMS, 320)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    save(tmp_path)
    return Renderer(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding(renderer: Renderer, text: str):
    ids = renderer.encode(text)
    assert renderer.decode(ids) == text
    assert all(0 <= token < renderer.vocab_size for token in ids)


def test_the_stop_token_is_no_part_of_the_answer(renderer: Renderer):
    (stop,) = renderer.stop_token_ids
    assert renderer.decode([*renderer.encode("91"), stop]) == "91"
    assert renderer.token_text(stop) == "<|end|>"


def test_a_prompt_is_the_template_and_nothing_else(renderer: Renderer):
    ids = renderer.prompt([{"role": "user", "content": "Calculate 34 + 57."}])
    assert (
        "".join(map(renderer.token_text, ids)) == "<|user|>Calculate 34 + 57.<|end|><|assistant|>"
    )
    assert len(ids) == 3 + len(renderer.encode("Calculate 34 + 57."))


@pytest.mark.parametrize("template", [None, CHATML])
@pytest.mark.parametrize("observation", ["That is not right. Try again.", "\n x\n", "数 12"])
def test_a_bridge_continues_the_conversation(
    tmp_path: Path, template: str | None, observation: str
):
    """Prompt, action and bridge together are the template's own text of the whole conversation."""
    save(tmp_path, template)
    renderer = Renderer(tmp_path)
    asked = [{"role": "user", "content": "Calculate 1 + 2."}]
    answered = [*asked, {"role": "assistant", "content": "4"}]
    again = [*answered, {"role": "user", "content": observation}]
    action = [*renderer.encode("4"), *renderer.stop_token_ids]
    grown = [*renderer.prompt(asked), *action, *renderer.bridge(observation)]
    assert grown == renderer.prompt(again)


def test_a_bridge_does_not_depend_on_what_was_sampled(renderer: Renderer):
    """An action need not be what its text encodes to, so it is never encoded again."""
    asked = [{"role": "user", "content": "Calculate 1 + 2."}]
    unmerged = [renderer.encode(character)[0] for character in "Calculate"]
    assert unmerged != renderer.encode("Calculate")
    action = [*unmerged, *renderer.stop_token_ids]
    grown = [*renderer.prompt(asked), *action, *renderer.bridge("no")]
    text = "".join(map(renderer.token_text, grown))
    assert text == (
        "<|user|>Calculate 1 + 2.<|end|><|assistant|>Calculate<|end|><|user|>no<|end|><|assistant|>"
    )


def test_hashes_name_the_template_and_the_tokenizer(tmp_path: Path):
    tokenizer = save(tmp_path)
    renderer = Renderer(tmp_path)
    assert isinstance(tokenizer.chat_template, str)
    template_hash = hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()
    assert renderer.chat_template_sha256 == template_hash
    file_hash = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    assert renderer.tokenizer_sha256 == file_hash
    save(tmp_path / "other", CHATML)
    other = Renderer(tmp_path / "other")
    assert other.chat_template_sha256 != renderer.chat_template_sha256
    assert other.tokenizer_sha256 == renderer.tokenizer_sha256
    assert other.name != renderer.name


@pytest.mark.parametrize("template", [FORGETS_OLD_ANSWERS, ENDS_NO_ANSWER])
def test_a_template_that_rewrites_history_is_refused(tmp_path: Path, template: str):
    save(tmp_path, template)
    with pytest.raises(ValueError, match=r"rewrites earlier turns.*only appends"):
        Renderer(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="has no usable tokenizer"):
        Renderer(tmp_path)


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path):
    save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"has no chat template; add chat_template\.jinja"):
        Renderer(tmp_path)
