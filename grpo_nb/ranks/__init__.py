"""Data parallel training: one process per GPU, started by torchrun; rank 0 leads and the other ranks follow.

Who does what. Rank 0 runs the same loop as a single process and alone owns the run: lock, knobs, log, checkpoints,
optimizer, controllers, rollback, evaluation, judges. The other ranks hold a replica of the policy and its reference,
and follow the messages of rank 0: sample completions, score tokens, accumulate gradients. So a step has one plan, one
set of denominators and one row, whatever the number of ranks, and a run resumes on any number of them.

One step. Rank 0 deals the prompts, each group to one rank (`deal`), with the rows of the step's table of random
numbers that belong to them; the ranks sample, and rank 0 gathers the completions. It computes advantages over all
groups, deals the groups anew by their tokens, and sends each rank its rows with the denominators of the complete
update. The ranks' gradients are added up in rank 0's `.grad` (`transfer.add_up`); it guards, clips and steps, and sends
the new weights (`transfer.send`). That is the traffic of an all-reduce, and needs the optimizer's moments once.

Two groups. Messages are JSON and tensors (safetensors bytes, no pickle) over gloo; weights and gradients go from device
to device, by nccl on CUDA and gloo on the CPU. Before each transfer every rank has answered a message, so that one that
died or hangs is found by a message, which names it, and seldom by a transfer, which does not.

When a rank dies, raises or is silent for `run.rank_timeout` seconds, rank 0 raises `RankError`, undoes the unfinished
step and saves; when rank 0 dies, the others end, and the newest checkpoint resumes. A rank whose memory is full reports
it, and rank 0 takes the decision of `training.memory_ladder` for all.

Rewards. Each rank computes the task's scores of a part of the completions. Judges and the caller's own functions are
called by rank 0 for all of them: waiting for a server is no work to share, and so one process holds the judge's
budget, cache and limit of requests, and a function sees the complete batch, as in a training on one GPU.

Sharded weights (FSDP2, `model.shard`). Each rank holds its rows of every layer of the base, which a forward or backward
pass gathers layer by layer. A gathering takes every rank, so all begin each pass together (`lockstep`): a rank whose
rows have finished makes passes over one token until the others have. Passes that rank 0 makes alone, e.g. to measure a
loss, have a message each. Adapters are on every rank, so all the above holds unchanged.

Where all weights learn, each rank trains its rows of every one (`training.parts`): backward passes add up and cut the
gradients, an optimizer step, a snapshot and a rollback are messages, norms are sums over the ranks, and rank 0 puts
checkpoints together, tensor by tensor, so that they are those of any number of ranks. Rank 0 cannot save alone: where a
rank dies, the newest checkpoint resumes.
"""
