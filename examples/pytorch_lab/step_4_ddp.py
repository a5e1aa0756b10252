"""Step 4: the same with DistributedDataParallel (DDP), a plain script of PyTorch. Numbered lines differ from step 0.

torchrun --nproc-per-node 2 step_4_ddp.py                                   # on Gloo
horovodrun -np 2 --torch-backend horovod python step_4_ddp.py               # on Horovod's engines, unchanged
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

dist.init_process_group("gloo")  # 1
torch.manual_seed(1)
digits = load_digits()
x = torch.from_numpy(digits.data).float() / 16
y = torch.from_numpy(digits.target)
training = torch.utils.data.TensorDataset(x[:1437], y[:1437])
sampler = torch.utils.data.DistributedSampler(training)  # 2
loader = torch.utils.data.DataLoader(training, batch_size=32, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
model = torch.nn.parallel.DistributedDataParallel(model)  # 3: averages gradients; all begin with the same weights
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * dist.get_world_size(), momentum=0.9)  # 4

for epoch in range(5):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(x[1437:]).argmax(dim=1) == y[1437:]).float().mean()
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: reads {right:.1%} of the test digits, by {dist.get_backend()}")
dist.destroy_process_group()
