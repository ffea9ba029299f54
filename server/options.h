#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace mambascope {

// Everything that can be set; the defaults fit a server embedded in another program.
struct Options {
  std::vector<std::string> models;  // "name=DIR" or "DIR"
  std::string model_repository;     // <model>/<version>/ folders; "" = none
  std::string grpc_address = "127.0.0.1:0";
  std::string http_address = "127.0.0.1:0";  // "" = no HTTP listener
  std::string port_file;                     // written once listening; "" = none
  int threads = 0;                           // computing; 0 = as many as the process may use
  std::string device = "cpu";                // where models run: cpu, cuda or cuda:N
  int32_t max_input_tokens = 16384;
  int32_t max_tokens = 4096;
  int32_t max_batch_tokens = 512;
  double max_queue_delay_ms = 0;
  int32_t max_queue = 256;
  int32_t max_running = 64;
  int max_request_bytes = 16 << 20;
  int64_t explanation_memory_bytes = -1;  // -1: a third of what is usable, at least 2 GiB
  double default_deadline_s = 600;
  double max_deadline_s = 3600;
  double drain_timeout_s = 10;
  std::string log_level = "info";  // info, warning, error, off
};

// Parses a command line. On --help, --version or a mistake prints to stdout or stderr and sets
// `exit_code` to 0 or 2, with which the caller exits; else to -1.
Options ParseOptions(int argc, char** argv, int* exit_code);

}  // namespace mambascope
