// See loss_options.h.
#include "cli/loss_options.h"

#include "cli/options.h"

namespace eaves::cli {
namespace {

/// Of the words that --reduction lets through.
Reduction parse_reduction(const std::string& word) {
  if (word == "none") return Reduction::none;
  return word == "sum" ? Reduction::sum : Reduction::mean;
}

}  // namespace

void LossOptions::add_to(CLI::App& command, const std::string& gradients) {
  command
      .add_option("--target", target,
                  "Name of the targets: int32 or int64 classes, one per row; or a distribution for each row, in the "
                  "shape of the logits")
      ->required();
  command.add_option("--weight", weight, "Name of the weights of the classes")->check(is_not_empty());
  command
      .add_option("--normalizer", normalizer,
                  "Name of one number that the mean divides by, instead of the rows that count")
      ->check(is_not_empty());
  command.add_option("--ignore-index", options.ignore_index, "Rows with this target do not count")
      ->capture_default_str();
  command
      .add_option_function<std::string>(
          "--reduction", [this](const std::string& word) { options.reduction = parse_reduction(word); },
          "none: a loss for each row; sum: of them; mean: over the rows that count")
      ->check(CLI::IsMember({"none", "sum", "mean"}))
      ->default_str("mean");
  command.add_option("--label-smoothing", options.label_smoothing, "0 to 1: how much of each target is spread evenly")
      ->capture_default_str();
  command.add_option("--softcap", options.softcap, "The logits are softcap * tanh(logits / softcap); 0: they are not")
      ->capture_default_str();
  command.add_option("--scale", options.scale, "The logits are multiplied with it first")->capture_default_str();
  command.add_option("--z-loss", options.z_loss_weight, "Weight of lse^2 in the loss; above 0 z_loss is written too")
      ->capture_default_str();
  command.add_flag("--argmax", has_argmax, "Also write argmax, the class with the largest logit");
  command.add_flag("--entropy", has_entropy, "Also write entropy, in nats");
  CLI::Option* backward = command.add_flag("--backward", has_backward, "Also write " + gradients);
  command
      .add_option("--grad", grad, "The same for an upstream gradient that is not 1: its name, in the shape of the loss")
      ->check(is_not_empty())
      ->excludes(backward);
}

}  // namespace eaves::cli
