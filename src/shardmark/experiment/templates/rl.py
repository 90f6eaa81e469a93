"""Learn to steer to a goal by policy gradients (REINFORCE: Williams, 1992)."""

import torch
from torch import nn

STEPS = 8


class Starts:
    """Each sample is an episode: its start, its goal, and the noise that chooses its actions."""

    def __init__(self, episodes, seed):
        generator = torch.Generator().manual_seed(seed)
        self.places = 2 * torch.rand(episodes, 2, generator=generator) - 1  # start and goal

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):  # the noise is seeded by epoch and sample, on whichever rank
        uniform = torch.rand(STEPS, 3).clamp(1e-6, 1 - 1e-6)
        return self.places[index], -(-uniform.log()).log()  # Gumbel: argmax samples the policy


class Task:
    model_calls = STEPS  # `loss` calls the policy in every step of an episode

    def __init__(self, width=64):
        self.width = width
        self.better = {"mean_return": "higher"}  # used by `compare --view time-to:mean_return`

    def model(self):  # (episodes, 2) -> logits of left, stay, right
        hidden = nn.Linear(2, self.width), nn.Tanh(), nn.Linear(self.width, self.width), nn.Tanh()
        return nn.Sequential(*hidden, nn.Linear(self.width, 3))

    def train_data(self):
        return Starts(2048, seed=0)

    def validation_data(self):
        return Starts(256, seed=1)

    def play(self, model, places, noise):
        """Return the log probability of the actions and the rewards, (episodes, STEPS) each."""
        position, goal = places.unbind(1)
        chances, rewards = [], []
        for step in range(STEPS):
            logits = model(torch.stack([position, goal], 1)).log_softmax(1)
            action = (logits.detach() + noise[:, step]).argmax(1)
            position = (position + 0.25 * (action - 1)).clamp(-1, 1)
            chances.append(logits.gather(1, action[:, None])[:, 0])
            rewards.append(-(position - goal).abs())
        return torch.stack(chances, 1), torch.stack(rewards, 1)

    def loss(self, model, batch):
        chances, rewards = self.play(model, *batch)
        to_go = rewards.flip(1).cumsum(1).flip(1)  # rewards from each step on
        baseline = -torch.arange(STEPS, 0, -1, device=to_go.device) * 0.3
        return (-(to_go - baseline) * chances).sum(), len(chances)

    def evaluate(self, model, batch):
        places, noise = batch
        _, rewards = self.play(model, places, torch.zeros_like(noise))  # the likeliest actions
        return {"returns": rewards.sum(), "episodes": len(rewards)}

    def metrics(self, sums):
        return {"mean_return": sums["returns"] / sums["episodes"]}
