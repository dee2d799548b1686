"""Messages to token ids, once: what the policy sampled is never encoded again.

A conversation grows by appending token ids. `bridge` gives the ids between an action and the next
one, so a turn's prompt always begins with everything before it. Templates that rewrite earlier
turns (those that drop old reasoning, say) cannot be bridged and are refused.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import AutoTokenizer

_ANSWER = "<<answer>>"
_OBSERVATION = "<<observation>>"


class Renderer:
    """The chat template and tokenizer in a Hugging Face folder.

    Raises `ValueError` if the folder has none, the tokenizer has no chat template, or the template
    does not keep earlier turns as they were.
    """

    def __init__(self, folder: Path):
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} has no usable tokenizer: {error}") from None
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise ValueError(
                f"The tokenizer in {folder} has no chat template; add chat_template.jinja."
            )
        self.name = f"chat-template/{hashlib.sha256(template.encode()).hexdigest()[:12]}"
        self.chat_template_sha256 = hashlib.sha256(template.encode()).hexdigest()
        self.tokenizer_sha256 = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        self.vocab_size = len(self._tokenizer)
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"The tokenizer in {folder} names no eos_token to stop at.")
        self.stop_token_ids: tuple[int, ...] = (self._tokenizer.eos_token_id,)
        self._before, self._after = self._bridge_text(folder)

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation up to where the policy speaks."""
        return self.encode(self._render(messages, add_generation_prompt=True))

    def bridge(self, observation: str) -> list[int]:
        """Ids that follow an action ended by the stop token: a user message and a new opening."""
        return self.encode(self._before + observation + self._after)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an action, for scorers and people; special tokens are left out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """Text of one token, special ones included."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Ids of text that nobody sampled."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        return self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )

    def _bridge_text(self, folder: Path) -> tuple[str, str]:
        """Template text before and after an observation, once the action and its stop token are
        there."""
        asked = [{"role": "user", "content": "x"}]
        answered = [*asked, {"role": "assistant", "content": _ANSWER}]
        again = [*answered, {"role": "user", "content": _OBSERVATION}]
        stop = self._tokenizer.eos_token
        opened = self._render(asked, add_generation_prompt=True)
        whole = self._render(again, add_generation_prompt=True)
        spoken = f"{opened}{_ANSWER}{stop}"
        if not whole.startswith(spoken):
            raise ValueError(
                f"The chat template in {folder} rewrites earlier turns or does not end an answer "
                f"with {stop}, so a second turn would be trained in a context the policy never "
                "saw; use a template that only appends."
            )
        before, found, after = whole.removeprefix(spoken).partition(_OBSERVATION)
        assert found, "the template renders the observation"
        return before, after
