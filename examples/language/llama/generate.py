"""Complete a line of Python with a model that train.py saved.

python generate.py out/model --prompt "def main("
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def complete(folder: str, prompt: str, max_new_tokens: int, temperature: float, lines: int) -> str:
    """``prompt`` and what the model writes after it, up to the end of its ``lines``-th line."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(device)
    # A line break may stand inside a token, so the text is cut after the tokens have been read, not by an end token.
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.eos_token_id,
        use_cache=True,
        **({"stop_strings": ["\n"], "tokenizer": tokenizer} if lines == 1 else {}),
        **sampling,
    )
    written = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return prompt + "\n".join(written.split("\n")[:lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="DIR/model of train.py --save DIR, or any Hugging Face folder")
    parser.add_argument("--prompt", default="def main(")
    parser.add_argument("--max_new_tokens", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.5, help="0 takes the likeliest token each time")
    parser.add_argument("--lines", type=int, default=1, help="lines to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    print(complete(args.folder, args.prompt, args.max_new_tokens, args.temperature, args.lines))


if __name__ == "__main__":
    main()
