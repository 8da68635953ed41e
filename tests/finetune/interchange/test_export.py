"""What a checkpoint holds for others: a Hugging Face folder that loads to the same policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import tiny_model as chat_model
from tapereel.finetune.trainer import save_checkpoint

from ..build import tiny_model


@pytest.mark.ledger("F85")
def test_the_folder_of_a_checkpoint_loads_in_transformers_to_the_same_policy(tmp_path: Path):
    tokenizer = char_tokenizer()
    model = chat_model(tokenizer, "micro", seed=3)
    made = save_checkpoint(tmp_path, model, {}, {}, update=7, tokenizer=tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(made.path / "hf", local_files_only=True)
    words = AutoTokenizer.from_pretrained(made.path / "hf", local_files_only=True)
    asked = [{"role": "user", "content": "1 + 2 ="}]
    ids, same = (
        each.apply_chat_template(asked, add_generation_prompt=True, return_dict=False) for each in (words, tokenizer)
    )
    assert ids == same
    ids = torch.tensor([ids])
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


@pytest.mark.ledger("F85", "F91")
def test_adapters_are_exported_alone_and_go_back_onto_their_base(tmp_path: Path):
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model(torch.float32), config)
    made = save_checkpoint(tmp_path, model, {}, {}, update=1)
    names = {path.name for path in (made.path / "hf").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    again = PeftModel.from_pretrained(tiny_model(torch.float32), made.path / "hf")
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
