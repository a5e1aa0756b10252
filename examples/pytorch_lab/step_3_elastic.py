"""Step 3: an elastic job goes on with the ranks that are left. Numbered lines are new.

horovodrun -np 3 --min-np 2 python step_3_elastic.py
horovodrun -np 3 --min-np 2 python step_3_elastic.py --lose-a-rank
"""

import os
import signal
import sys

import torch
from sklearn.datasets import load_digits

import horovod.torch as hvd

hvd.init()
torch.manual_seed(1)
digits = load_digits()
x = torch.from_numpy(digits.data).float() / 16
y = torch.from_numpy(digits.target)
training = torch.utils.data.TensorDataset(x[:1437], y[:1437])
sampler = hvd.elastic.ElasticSampler(training)  # 1: goes on within an epoch, with any number of ranks
loader = torch.utils.data.DataLoader(training, batch_size=32, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)  # 2: what all ranks have in common
first_rank = hvd.rank()


@hvd.elastic.run  # 3: called again after ranks were lost or added; it gives all of them one state, so there is no broadcast
def train(state):
    while state.epoch < 5:
        for number, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            sampler.record_batch(number, batch_size=32)
            state.commit()  # 4: a loss costs no more than the work after this line
            if "--lose-a-rank" in sys.argv and state.epoch == 2 and first_rank == hvd.rank() == 1 and hvd.size() == 3:
                os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
        with torch.no_grad():
            right = (model(x[1437:]).argmax(dim=1) == y[1437:]).float().mean()
        if hvd.rank() == 0:
            print(f"epoch {state.epoch + 1}: reads {right:.1%} of the test digits, {hvd.size()} ranks")
        state.epoch += 1
        sampler.set_epoch(state.epoch)


train(state)
