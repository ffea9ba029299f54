// mambascope: the command line. Each subcommand is flags -> struct -> one function.
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "client/cli/connection.h"
#include "client/cli/embedded.h"
#include "client/cli/errors.h"
#include "client/cli/explain_option.h"
#include "client/cli/info_commands.h"
#include "client/cli/interrupt.h"
#include "client/cli/predict_command.h"
#include "client/cli/terminal.h"

namespace mambascope::cli {
namespace {

constexpr double kHealthTimeout = 5;  // seconds; a probe that waits longer tells nothing

// What subcommands share.
struct CommonFlags {
  std::string server;
  std::vector<std::string> models;
  ColorMode color = ColorMode::kAuto;
};

// A server to talk to: the one at --server, or one of our own.
struct Backend {
  std::unique_ptr<Embedded> embedded;
  std::shared_ptr<grpc::Channel> channel;
  std::vector<std::string> models;  // as the server names them
};

ExitCode Open(const CommonFlags& flags, const Output& output, Backend* backend) {
  if (!flags.server.empty()) {
    backend->channel = Connect(flags.server, output.err_screen, output.err);
    backend->models = flags.models;
    return backend->channel == nullptr ? kNotReachable : kDone;
  }
  if (flags.models.empty()) {
    PrintError("without --server a --model to load is needed", output.err_screen, output.err);
    return kUsage;
  }
  auto embedded = StartEmbedded(flags.models);
  if (!embedded.ok()) {
    PrintError(std::string(embedded.status().message()), output.err_screen, output.err);
    return kUsage;
  }
  backend->embedded = *std::move(embedded);
  backend->channel = backend->embedded->channel();
  const grpc::Status listed = ServedModels(backend->channel, &backend->models);
  if (!listed.ok()) {
    PrintError(DetailedStatus(listed), output.err_screen, output.err);
    return kRefused;
  }
  if (backend->models.empty()) {
    PrintError("no model was loaded", output.err_screen, output.err);
    return kUsage;
  }
  return kDone;
}

void AddServer(CLI::App* command, CommonFlags* flags, bool optional) {
  command
      ->add_option("--server", flags->server,
                   optional
                       ? "Address of a server, as 127.0.0.1:8001; without it --model is loaded "
                         "into this process"
                       : "Address of a server, as 127.0.0.1:8001")
      ->required(!optional);
}

void AddModel(CLI::App* command, CommonFlags* flags) {
  command
      ->add_option("--model", flags->models,
                   "NAME or NAME@VERSION of the server's; without --server DIR or NAME=DIR to load")
      ->required()
      ->expected(1);
}

void AddColor(CLI::App* command, CommonFlags* flags) {
  static const std::map<std::string, ColorMode> kModes = {
      {"auto", ColorMode::kAuto}, {"always", ColorMode::kAlways}, {"never", ColorMode::kNever}};
  command
      ->add_option("--color", flags->color, "auto (on a terminal without NO_COLOR), always, never")
      ->transform(CLI::CheckedTransformer(kModes).description(""))
      ->type_name("MODE");
}

void AddTarget(CLI::App* command, PredictFlags* flags) {
  command->add_option("--target", flags->target,
                      "POS[:TOKEN]: the position whose next token is explained (negative from the "
                      "end), and which token: an id, or its text; gen:K[:TOKEN] or gen:A-B: of the "
                      "generated tokens, counted from 0; class:NUMBER of a classifier");
  command->add_option("--contrast", flags->contrast,
                      "TOKEN or class:NUMBER: why the target rather than this one");
  command->add_option("--target_value", flags->target_value,
                      "What of the target is explained: logit (the default) or log_probability");
}

void AddFaithfulness(CLI::App* command, PredictFlags* flags) {
  command->add_flag("--faithfulness{zero}", flags->faithfulness,
                    "[=zero|delete|token:ID]: how far the model agrees with every explanation that "
                    "gives one score a token, by removing tokens in the order of their scores");
  command->add_option("--faithfulness_draws", flags->faithfulness_draws,
                      "Random orders to compare with");
  command->add_option("--faithfulness_seed", flags->faithfulness_seed, "Of the random orders");
  command->add_option("--faithfulness_shares", flags->faithfulness_shares,
                      "Shares of the tokens that are removed or kept: 0.1+0.2");
  command->add_option("--faithfulness_points", flags->faithfulness_points, "Of each curve");
}

void AddPredict(CLI::App* app, CommonFlags* common, PredictFlags* flags) {
  CLI::App* command =
      app->add_subcommand("predict", "Predict, with explanations of the prediction");
  AddServer(command, common, /*optional=*/true);
  AddModel(command, common);
  auto* text = command->add_option("--text", flags->text, "The input as text");
  auto* tokens = command->add_option("--tokens", flags->tokens, "The input as token ids: 1,2,3");
  text->excludes(tokens);
  command
      ->add_option("--image", flags->image,
                   "The input as a picture: PNG, JPEG, or a .safetensors with one normalised "
                   "float32 tensor [3, height, width]")
      ->excludes(text)
      ->excludes(tokens);
  command->add_option("--explain", flags->explain, "METHOD[:key=value,...]; repeatable, see below")
      ->allow_extra_args(false);
  AddTarget(command, flags);
  AddFaithfulness(command, flags);
  command->add_option("--max_tokens", flags->max_tokens, "Tokens to generate");
  command->add_option("--temperature", flags->temperature, "0: always the most probable");
  command->add_option("--top_p", flags->top_p, "Choose among the most probable that sum to this");
  command->add_option("--top_k", flags->top_k, "Choose among this many");
  command->add_option("--seed", flags->seed, "Same seed, same tokens");
  command->add_option("--stop", flags->stop, "Generation ends before this text; repeatable")
      ->allow_extra_args(false);
  command->add_flag("--ignore_eos", flags->ignore_eos, "Go on past the end-of-text token");
  command->add_option("--top_logprobs", flags->top_logprobs, "Show this many alternatives");
  command->add_flag("--logits", flags->logits, "Also deliver the tensor `logits`");
  command->add_option("--delivery", flags->delivery,
                      "How numbers travel: fp32 (the default), fp16, uint8");
  command->add_option("--sparse", flags->sparse,
                      "Of rows over tokens only top_k:N entries, those from threshold:X on, or the "
                      "fewest that hold mass:X of each row; the rest counts as 0");
  command->add_option("--request_id", flags->request_id, "Your own id for the request");
  command->add_option("--label", flags->labels, "key=value for the server's log; repeatable")
      ->allow_extra_args(false);
  command->add_option("--timeout", flags->timeout, "Seconds until the call is given up")
      ->check(CLI::PositiveNumber);
  command->add_flag("--json", flags->json, "One event a line, as protobuf JSON");
  command->add_option("--output", flags->output,
                      "A .safetensors file for every explanation's tensors (ID, ID/NAME)");
  AddColor(command, common);
  command->footer(ExplainHelp());
}

void AddTokenize(CLI::App* app, CommonFlags* common, TokenizeFlags* flags) {
  CLI::App* command = app->add_subcommand("tokenize", "What the model's tokenizer makes of a text");
  AddServer(command, common, /*optional=*/true);
  AddModel(command, common);
  command->add_option("--text", flags->text, "The text")->required();
  command->add_option("--timeout", flags->timeout, "Seconds until the call is given up")
      ->check(CLI::PositiveNumber);
  command->add_flag("--json", flags->json, "As protobuf JSON");
}

void AddModels(CLI::App* app, CommonFlags* common, ModelsFlags* flags) {
  CLI::App* command = app->add_subcommand("models", "What is served; with --model, what it can do");
  AddServer(command, common, /*optional=*/true);
  command
      ->add_option("--model", common->models,
                   "NAME or NAME@VERSION to describe; without --server DIR or NAME=DIR to load; "
                   "repeatable")
      ->allow_extra_args(false);
  command->add_option("--length", flags->length,
                      "Input length in tokens that methods are priced for");
  command->add_option("--timeout", flags->timeout, "Seconds until a call is given up")
      ->check(CLI::PositiveNumber);
  command->add_flag("--json", flags->json, "As protobuf JSON");
}

void AddHealth(CLI::App* app, CommonFlags* common, HealthFlags* flags) {
  CLI::App* command = app->add_subcommand("health", "Whether a server serves");
  AddServer(command, common, /*optional=*/false);
  command->add_option("--service", flags->service,
                      "Full name of a gRPC service; default: the server");
  command->add_option("--timeout", flags->timeout, "Seconds until the call is given up")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
}

int Main(int argc, char** argv) {
  InstallInterrupt();
  CLI::App app("mambascope: predictions of Mamba models, with the evidence for them", "mambascope");
  app.set_version_flag("--version", MAMBASCOPE_VERSION);
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 done, 1 failed here (the output cannot be written), 2 usage, 3 the server's\n"
      "refusal, 4 not reachable, 130 interrupted.");
  CommonFlags common;
  PredictFlags predict;
  TokenizeFlags tokenize;
  ModelsFlags models;
  HealthFlags health{.service = "", .timeout = kHealthTimeout};
  AddPredict(&app, &common, &predict);
  AddTokenize(&app, &common, &tokenize);
  AddModels(&app, &common, &models);
  AddHealth(&app, &common, &health);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error, std::cout, std::cerr) == 0 ? kDone : kUsage;
  }

  const Output output = {std::cout, ScreenOf(STDOUT_FILENO, common.color), std::cerr,
                         ScreenOf(STDERR_FILENO, common.color), IsTerminal(STDERR_FILENO)};
  v1::PredictRequest request;
  if (app.got_subcommand("predict")) {
    // Before anything is loaded or connected to: a typing error should show at once.
    auto built = BuildRequest(predict);
    if (!built.ok()) {
      PrintError(std::string(built.status().message()), output.err_screen, output.err);
      return kUsage;
    }
    request = *std::move(built);
  }
  Backend backend;
  if (const ExitCode code = Open(common, output, &backend); code != kDone) return code;
  if (app.got_subcommand("predict")) {
    request.set_model(backend.models.front());
    return Predict(backend.channel, request, predict, output);
  }
  const ExitCode code = [&] {
    if (app.got_subcommand("tokenize")) {
      tokenize.model = backend.models.front();
      return Tokenize(backend.channel, tokenize, output);
    }
    if (app.got_subcommand("models")) {
      models.models = backend.models;
      return Models(backend.channel, models, output);
    }
    return Health(backend.channel, health, output);
  }();
  if (code == kDone && !output.out.flush()) {
    PrintError("the output could not be written", output.err_screen, output.err);
    return kFailedHere;
  }
  return code;
}

}  // namespace
}  // namespace mambascope::cli

int main(int argc, char** argv) { return mambascope::cli::Main(argc, argv); }
