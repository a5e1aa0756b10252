"""Step 0: one process.

python step_0_one_process.py
"""

import torch
from sklearn.datasets import load_digits

torch.manual_seed(1)
digits = load_digits()
x = torch.from_numpy(digits.data).float() / 16
y = torch.from_numpy(digits.target)
training = torch.utils.data.TensorDataset(x[:1437], y[:1437])
loader = torch.utils.data.DataLoader(training, batch_size=32, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(5):
    for images, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(x[1437:]).argmax(dim=1) == y[1437:]).float().mean()
    print(f"epoch {epoch + 1}: reads {right:.1%} of the test digits")
