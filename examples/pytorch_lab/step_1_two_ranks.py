"""Step 1: any number of ranks train one model. Numbered lines are new.

horovodrun -np 2 python step_1_two_ranks.py
"""

import torch
from sklearn.datasets import load_digits

import horovod.torch as hvd

hvd.init()  # 1: this process becomes rank hvd.rank() of hvd.size()
torch.manual_seed(1)
digits = load_digits()
x = torch.from_numpy(digits.data).float() / 16
y = torch.from_numpy(digits.target)
training = torch.utils.data.TensorDataset(x[:1437], y[:1437])
sampler = torch.utils.data.DistributedSampler(
    training, num_replicas=hvd.size(), rank=hvd.rank()
)  # 2: its part of the data
loader = torch.utils.data.DataLoader(training, batch_size=32, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)  # 3: the batch grew
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # 4: gradients are averaged
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # 5: all begin with the same weights

for epoch in range(5):
    sampler.set_epoch(epoch)  # another order in each epoch
    for images, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(x[1437:]).argmax(dim=1) == y[1437:]).float().mean()
    if hvd.rank() == 0:  # one rank prints
        print(f"epoch {epoch + 1}: reads {right:.1%} of the test digits")
