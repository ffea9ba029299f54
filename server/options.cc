#include "server/options.h"

#include <CLI/CLI.hpp>
#include <iostream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/version.h"

namespace mambascope {

namespace {

// CLI::Range lets NaN pass.
CLI::Validator Between(double low, double high) {
  return CLI::Validator(
      [low, high](std::string& text) {
        double value = 0;
        const bool inside = CLI::detail::lexical_cast(text, value) && value >= low && value <= high;
        return inside ? std::string()
                      : text + " is outside " + std::to_string(low) + " to " + std::to_string(high);
      },
      "");
}

// gRPC would listen on some other port.
CLI::Validator ValidPort() {
  return CLI::Validator(
      [](std::string& address) -> std::string {
        const size_t colon = address.rfind(':');
        int64_t port = 0;
        if (colon == std::string::npos || address.rfind("unix:", 0) == 0) return "";
        if (!absl::SimpleAtoi(address.substr(colon + 1), &port)) return "";
        if (port >= 0 && port <= 65535) return "";
        return absl::StrCat("port ", port, " is outside 0 to 65535");
      },
      "");
}

}  // namespace

Options ParseOptions(int argc, char** argv, int* exit_code) {
  Options options;
  options.grpc_address = "127.0.0.1:8500";
  options.http_address = "127.0.0.1:8501";
  CLI::App app("Serves Mamba models: predictions with the evidence for them.", "mambascope-server");
  app.set_version_flag("--version", kVersion);
  app.option_defaults()->always_capture_default();
  app.add_option("--model", options.models, "name=DIR of a Hugging Face folder; may be repeated")
      ->type_size(1)
      ->allow_extra_args(false)
      ->type_name("NAME=DIR");
  app.add_option("--model_repository", options.model_repository,
                 "Folder of <model>/<version>/ folders");
  app.add_option("--grpc_address", options.grpc_address, "HOST:PORT; port 0 takes a free one")
      ->check(ValidPort());
  app.add_option("--http_address", options.http_address,
                 "HOST:PORT of metrics and probes; empty for none")
      ->check(ValidPort());
  app.add_option("--port_file", options.port_file,
                 "Written with grpc=PORT and http=PORT once both listen");
  app.add_option("--threads", options.threads,
                 "Computing threads; 0 = as many as the process may use")
      ->check(CLI::Range(0, 1024));
  app.add_option("--device", options.device, "Where models run: cpu, cuda (the first) or cuda:N");
  app.add_option("--max_input_tokens", options.max_input_tokens, "Longest input")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--max_tokens", options.max_tokens, "Longest generation")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--max_batch_tokens", options.max_batch_tokens, "Tokens in one forward pass")
      ->check(CLI::Range(64, 1 << 16));
  app.add_option("--max_queue_delay_ms", options.max_queue_delay_ms,
                 "How long a call waits for company when nothing runs")
      ->check(Between(0, 1000));
  app.add_option("--max_queue", options.max_queue, "Calls waiting for their first pass")
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--max_running", options.max_running, "Sequences running at once")
      ->check(CLI::Range(1, 4096));
  app.add_option("--max_request_bytes", options.max_request_bytes, "Largest request message")
      ->check(CLI::Range(1 << 10, 1 << 30));
  app.add_option(
         "--explanation_memory_bytes", options.explanation_memory_bytes,
         "Memory of all running explanations together; -1: a third of what this process may "
         "use, at least 2 GiB")
      ->check(CLI::Range(int64_t{-1}, int64_t{1} << 50));
  app.add_option("--default_deadline_s", options.default_deadline_s, "For calls that bring none")
      ->check(Between(0.001, 1e6));
  app.add_option("--max_deadline_s", options.max_deadline_s, "No call runs longer")
      ->check(Between(0.001, 1e6));
  app.add_option("--drain_timeout_s", options.drain_timeout_s,
                 "After SIGTERM, how long running calls may take before they are ended")
      ->check(Between(0, 1e6));
  app.add_option("--log_level", options.log_level, "info, warning, error or off")
      ->check(CLI::IsMember({"info", "warning", "error", "off"}));
  try {
    app.parse(argc, argv);
    *exit_code = -1;
  } catch (const CLI::ParseError& error) {
    *exit_code = app.exit(error) == 0 ? 0 : 2;
  }
  return options;
}

}  // namespace mambascope
