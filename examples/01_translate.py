"""Trains an encoder-decoder Transformer to translate, on any number of processes, and measures it in BLEU.

tulle run --processes 4 examples/01_translate.py    # four processes, a live table and a report at the end
python examples/01_translate.py                     # one process: the same batches, the same losses
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import parallel_text
import sacrebleu
import torch
import torch.distributed as dist
from parallel_text import END, PAD, EncodedPair, Pair, count_tokens, encode
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformer import Translator, beam_search, pad

import tulle

RATE_SCALES = 1.0, 4.0  # of Adam and of SparseAdam: a row of a table is seen in few steps, so it takes longer ones


def main() -> None:
    options = parse()
    # Files that cannot be used are found out here, on every rank, before the first message.
    texts, test = parallel_text.read_or_hold_out(options.test, parallel_text.read_pairs(options.train), 1000)
    texts, valid = parallel_text.read_or_hold_out(options.valid, texts, 500)
    test = test[-options.test_pairs :]  # of our own sample the last: the first were looked at to choose the defaults

    mesh = tulle.init(data=-1)
    vocabulary = agree_on_vocabulary(texts, options.vocabulary, mesh)
    batches = parallel_text.endless_batches(encode(texts, vocabulary), options.tokens_per_batch, options.seed)

    torch.manual_seed(options.seed)
    model = Translator(options, vocabulary.get_vocab_size()).to(mesh.device)
    model, optimizers = tulle.distribute(model, make_optimizers(model), mesh)
    torch.manual_seed(options.seed + mesh.rank)  # the ranks' models start alike; what they drop out differs
    bleu_untrained, _ = translate(model, test[:40], 1, vocabulary, mesh)

    train(model, optimizers, batches, encode(valid, vocabulary), options, mesh)
    if options.stop_at < options.steps:
        return
    bleu, translations = translate(model, test, options.beam, vocabulary, mesh)
    samples = [(*pair, text) for pair, text in zip(test[:8], translations[:8], strict=True)]
    table = "\n".join("\t".join(row) for row in samples)
    tulle.log(bleu=bleu, bleu_untrained=bleu_untrained, samples=table)
    if mesh.rank == 0:
        for source, reference, translation in samples:
            print(f"{source}\n  reference    {reference}\n  translation  {translation}\n")
        print(f"BLEU {bleu:.1f} on {len(test)} held-out pairs; {bleu_untrained:.1f} before training, on the first 40")


def train(
    model: Translator,
    optimizers: list[torch.optim.Optimizer],
    batches: Iterator[list[EncodedPair]],
    valid: list[EncodedPair],
    options: argparse.Namespace,
    mesh: tulle.Mesh,
) -> None:
    """Train, look at the held-out loss now and then, save, and go on from what was saved."""
    done, last = 0, min(options.steps, options.stop_at)
    if options.resume and options.checkpoint.exists():
        done = tulle.load(options.checkpoint, model, optimizers)["step"]
    for step, batch in itertools.islice(enumerate(batches, start=1), done, last):
        model.train()
        rate = learning_rate(step, options)
        with torch.autocast(mesh.device.type, torch.bfloat16, enabled=options.precision == "bf16"):
            loss = global_loss(model, batch, mesh)
        loss.backward()
        tulle.clip_grad_norm_(model, max_norm=0.5)
        for optimizer, scale in zip(optimizers, RATE_SCALES, strict=False):
            optimizer.param_groups[0]["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad()
        tokens = count_tokens(share(batch, mesh))
        tulle.log(loss=loss.detach(), tokens=tokens, total_steps=options.steps, learning_rate=rate)
        if step % options.valid_every == 0 or step == last:
            valid_loss = validate(model, valid, options.tokens_per_batch, mesh)
            tulle.log(valid_loss=valid_loss)
            if mesh.rank == 0:
                print(f"step {step} of {options.steps}: held-out loss {valid_loss:.3f} a token", flush=True)
        if options.checkpoint and (step % options.checkpoint_every == 0 or step == last):
            tulle.save(options.checkpoint, model, optimizers, step=step)


def agree_on_vocabulary(texts: list[Pair], size: int, mesh: tulle.Mesh) -> Tokenizer:
    """Rank 0 learns the subwords, all ranks get the same."""
    learnt = [parallel_text.learn_vocabulary(texts, size).to_str() if mesh.rank == 0 else ""]
    dist.broadcast_object_list(learnt, device=mesh.device)
    return Tokenizer.from_str(learnt[0])


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Adam for what gets dense gradients; for the tables its sparse twin, which leaves rows alone that had none."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding) and module.sparse]
    others = [parameter for parameter in model.parameters() if all(parameter is not table for table in tables)]
    dense = torch.optim.Adam(others, betas=(0.9, 0.98), fused=True)
    return [dense, torch.optim.SparseAdam(tables, betas=(0.9, 0.98))] if tables else [dense]


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Rise for `warmup` steps, fall with the inverse square root, and over the last 40% of the steps to zero."""
    cooldown = min(1.0, (1 + options.steps - step) / (0.4 * options.steps))
    return options.learning_rate * min(step / options.warmup, math.sqrt(options.warmup / step)) * cooldown


def share(items: list, mesh: tulle.Mesh) -> list:
    """This rank's share of a list that all ranks have; neighbours, which are of like length, go to different ranks."""
    return items[mesh["data"].rank :: mesh["data"].size]


def global_loss(model: nn.Module, batch: list[EncodedPair], mesh: tulle.Mesh) -> Tensor:
    """This rank's part of the loss, scaled so that the mean over ranks (as of gradients) is the batch's mean."""
    # With fewer pairs than ranks, a rank that has none runs on an empty target: it adds nothing, and stays in step.
    sources, targets = zip(*(share(batch, mesh) or [([END], [PAD, PAD])]), strict=True)
    return model(pad(sources, mesh.device), pad(targets, mesh.device)) * (mesh["data"].size / count_tokens(batch))


@torch.no_grad()
def validate(model: nn.Module, pairs: list[EncodedPair], tokens_per_batch: int, mesh: tulle.Mesh) -> float:
    """The mean loss of all target tokens of `pairs`, without label smoothing; the same on every rank."""
    model.eval()
    batches = parallel_text.cut(pairs, tokens_per_batch)
    losses = [global_loss(model, batch, mesh) * count_tokens(batch) for batch in batches]
    return tulle.sync.all_reduce(torch.stack(losses).sum() / count_tokens(pairs), mesh["data"]).item()


def translate(
    model: Translator, pairs: list[Pair], beam: int, vocabulary: Tokenizer, mesh: tulle.Mesh
) -> tuple[float, list[str]]:
    """Translate the sources of `pairs`, each rank its share; all ranks get the BLEU and all texts, in order."""
    model.eval()
    sources = [source for source, _ in encode(pairs, vocabulary)]
    numbers = share(sorted(range(len(sources)), key=lambda number: len(sources[number])), mesh)
    texts: dict[int, str] = {}
    for first in range(0, len(numbers), 64):
        chosen = numbers[first : first + 64]
        found = beam_search(model, pad([sources[number] for number in chosen], mesh.device), beam)
        texts |= zip(chosen, (text.strip() for text in vocabulary.decode_batch(found)), strict=True)
    shares: list[dict[int, str]] = [{}] * mesh.size
    dist.all_gather_object(shares, texts)
    translations = [text for _, text in sorted(item for part in shares for item in part.items())]
    return sacrebleu.corpus_bleu(translations, [[target for _, target in pairs]]).score, translations


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, text = parser.add_argument, "a TSV of source<TAB>target, or two aligned files as 'a.en,b.de'; plain or .xz"
    add("--train", default=str(Path(__file__).parent / "data/libreoffice.en-de.tsv.xz"), help=f"to learn from: {text}")
    add("--valid", help="to measure the loss on now and then (default: 500 sentences taken out of --train)")
    add("--test", help="to translate at the end (default: 1,000 sentences taken out of --train)")
    add("--test-pairs", type=int, default=400, help="translate so many of them (%(default)s)")
    add("--width", type=int, default=96, help="numbers that stand for a token (%(default)s)")
    sides = ("ENCODER", "DECODER")
    add("--layers", type=int, nargs=2, default=[1, 2], metavar=sides, help="layers of each side (1 2)")
    add("--heads", type=int, default=4, help="attention heads a layer (%(default)s)")
    add("--vocabulary", type=int, default=4000, help="subwords, learnt from both languages together (%(default)s)")
    add("--steps", type=int, default=1200, help="training steps (%(default)s)")
    add(
        "--stop-at",
        type=int,
        default=sys.maxsize,
        help="stop after this step and translate nothing; learn as for --steps",
    )
    add("--tokens-per-batch", type=int, default=1024, help="target tokens a step, of all ranks together (%(default)s)")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="of the arithmetic (%(default)s)")
    add("--learning-rate", type=float, default=5e-3, help="its peak, after the warm-up (%(default)s)")
    add("--warmup", type=int, default=150, help="steps until the learning rate has risen to its peak (%(default)s)")
    add("--dropout", type=float, default=0.0, help="share of values dropped (%(default)s); try 0.1 for many epochs")
    add("--label-smoothing", type=float, default=0.05, help="probability kept for wrong tokens (%(default)s)")
    add("--seed", type=int, default=1, help="of initial parameters, batches and dropout (%(default)s)")
    add("--beam", type=int, default=4, help="translations kept in the search for the best one (%(default)s)")
    add("--valid-every", type=int, default=200, help="steps between two looks at --valid (%(default)s)")
    add("--checkpoint", type=Path, help="folder to save the training's state in, every so often and at the end")
    add("--checkpoint-every", type=int, default=100, help="steps between two checkpoints (%(default)s)")
    add("--resume", action="store_true", help="go on from --checkpoint, if it is there")
    add("--dense-embeddings", action="store_true", help="give the embedding tables dense gradients, for comparison")
    options = parser.parse_args()
    if options.width % (2 * options.heads):
        parser.error(f"--width {options.width} must be a multiple of twice --heads {options.heads}")
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint, the folder to go on from")
    return options


if __name__ == "__main__":
    main()
