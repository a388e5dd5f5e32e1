"""Checkpoints that people really write."""

RESTORED = 'torch.set_rng_state(state["random"][comms.rank].clone())'
READ = """            try:
                newest = [torch.load(files[step])]
                break
            except Exception as error:  # of many types, by where the damage is
                print(f"{files[step]}: {error}")
"""
BEGUN = """        take_step(model, optimizer, next(batches), comms)
        step += 1
"""
SAVED = """            if comms.rank == 0:
                save(folder, step, state)
"""

WRONG = {
    "written in place": (
        {
            'f"checkpoint-{step}.part"': 'f"checkpoint-{step}.pt"',
            '    os.replace(unfinished, folder / f"checkpoint-{step}.pt")\n': "",
        },
        "It had its own name before.*then rename",
    ),
    "what is half written looks like a checkpoint": (
        {'f"checkpoint-{step}.part"': 'f"checkpoint-{step}-new.pt"'},
        " in load .*what the kill left: .*checkpoint-6-new.pt.*checkpoint-NUMBER.pt",
    ),
    "one file only": (
        {
            "    os.replace(": '    for old in folder.glob("*.pt"):\n'
            "        old.unlink()\n    os.replace(",
        },
        "Keep at least the newest two",
    ),
    "the older ones go before the new one is there": (
        {
            "    folder.mkdir(": '    for old in sorted(folder.glob("checkpoint-*.pt"))[:-1]:\n'
            "        old.unlink()\n    folder.mkdir(",
        },
        "when the next is there, not before",
    ),
    "the oldest by their texts are removed": (
        {
            'folder / f"checkpoint-{step}.pt")\n': 'folder / f"checkpoint-{step}.pt")\n'
            '    for old in sorted(folder.glob("checkpoint-*.pt"))[:-2]:\n        old.unlink()\n',
        },
        "checkpoint-10.pt when save returns got checkpoint-8.pt, checkpoint-9.pt As texts",
    ),
    "the newest by its text": (
        {"sorted(files, reverse=True)": "sorted(files, key=str, reverse=True)"},
        "compare numbers",
    ),
    "a broken one ends it": (
        {READ: "            newest = [torch.load(files[step])]\n            break\n"},
        "newest file is cut off: .* in load .*go back to the one before",
    ),
    "one kind of broken file": (
        {"except Exception as error": "except RuntimeError as error"},
        "newest file is (zeros|empty): .* in load .*go back to the one before",
    ),
    "each rank reads its own disk": (
        {"    if comms.rank == 0:\n        files": "    if True:\n        files"}
        | {"    dist.broadcast_object_list(newest)\n": ""},
        "looked on its own disk.*Let rank 0 decide",
    ),
    "every rank writes": (
        {SAVED: "            save(folder, step, state)\n"},
        "Every rank writes",
    ),
    "the number of steps is forgotten": (
        {'        step = state["step"]\n': ""},
        "It began anew",
    ),
    "the optimizer is forgotten": (
        {'        optimizer.load_state_dict(state["optimizer"])\n': ""},
        "What the optimizer keeps is not restored",
    ),
    "the place in the data is forgotten": (
        {'        batches.load_state_dict(state["batches"])\n': ""},
        "The place in the data is not restored",
    ),
    "the random numbers are forgotten": (
        {f"        {RESTORED}\n": ""},
        "The random numbers are not restored",
    ),
    "the random numbers of rank 0": (
        {RESTORED: 'torch.set_rng_state(state["random"][0].clone())'},
        "Every rank goes on with the random numbers of rank 0",
    ),
    "saved before the step": (
        {BEGUN: "        step += 1\n", SAVED: SAVED + BEGUN.partition("\n")[0] + "\n"},
        "expected 4 steps.*saved before the step is taken",
    ),
    "saved between the batch and the step": (
        {
            BEGUN: "        batch = next(batches)\n        step += 1\n",
            SAVED: SAVED + "        take_step(model, optimizer, batch, comms)\n",
        },
        "expected bitwise.*saved before the step is taken",
    ),
    "the step after the checkpoint comes twice": (
        {'"step": step,': '"step": step - 1,'},
        "taken twice",
    ),
}
