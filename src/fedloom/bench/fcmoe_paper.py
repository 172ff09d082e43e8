"""The numbers that the FC-MoE paper prints (arXiv 2606.15625), with where each stands.

Its Table I and Table II are complete in the text that we have; figures 3 and 4 print no numbers.
"""

from __future__ import annotations

#: What the paper trains; it does not say which size.
BACKBONE = "Switch Transformer, 16 experts"
#: α of Table II and of all figures.
ALPHA = 0.1

TABLE1 = "Table I, one run each as far as it says"
#: task → label → α → (accuracy, precision, recall) of the global model.
GLOBAL: dict[str, dict[str, dict[float, tuple[float, float, float]]]] = {
    "ag_news": {
        "fedavg_moe": {
            0.1: (0.7740, 0.7940, 0.7568),
            0.5: (0.8866, 0.8921, 0.8739),
            1.0: (0.8978, 0.9089, 0.8907),
        },
        "pfl_moe": {
            0.1: (0.7994, 0.8223, 0.7911),
            0.5: (0.9041, 0.9128, 0.9036),
            1.0: (0.9109, 0.9170, 0.9106),
        },
        "fedmoe": {
            0.1: (0.8137, 0.8374, 0.8056),
            0.5: (0.9103, 0.9192, 0.9120),
            1.0: (0.9164, 0.9204, 0.9155),
        },
        "fcmoe": {
            0.1: (0.8359, 0.8617, 0.8360),
            0.5: (0.9194, 0.9246, 0.9194),
            1.0: (0.9224, 0.9230, 0.9223),
        },
    },
    "mmlu": {
        "fedavg_moe": {
            0.1: (0.3008, 0.3870, 0.3002),
            0.5: (0.3482, 0.3854, 0.3478),
            1.0: (0.4012, 0.4002, 0.4010),
        },
        "pfl_moe": {
            0.1: (0.3325, 0.3541, 0.3301),
            0.5: (0.3789, 0.3947, 0.3740),
            1.0: (0.4305, 0.4242, 0.4275),
        },
        "fedmoe": {
            0.1: (0.3506, 0.3699, 0.3500),
            0.5: (0.3921, 0.4063, 0.3919),
            1.0: (0.4463, 0.4412, 0.4460),
        },
        "fcmoe": {
            0.1: (0.3764, 0.4017, 0.3760),
            0.5: (0.4169, 0.4372, 0.4168),
            1.0: (0.4695, 0.4650, 0.4694),
        },
    },
}

TABLE2 = "Table II, α = 0.1; a) to c) there are the three ablations, in this order"
#: task → label → (test accuracy of the global model, local accuracy).
ABLATION: dict[str, dict[str, tuple[float, float]]] = {
    "ag_news": {
        "fcmoe_wo_projection": (0.7849, 0.5574),
        "fcmoe_wo_retention": (0.8068, 0.6108),
        "fcmoe_wo_importance": (0.8264, 0.6459),
        "fcmoe": (0.8359, 0.6732),
    },
    "mmlu": {
        "fcmoe_wo_projection": (0.3306, 0.2992),
        "fcmoe_wo_retention": (0.3478, 0.3225),
        "fcmoe_wo_importance": (0.3616, 0.3428),
        "fcmoe": (0.3764, 0.3559),
    },
}
