#pragma once

#include <ostream>

#include "client/cli/terminal.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "mambascope/v1/explanation.pb.h"

namespace mambascope::cli {

// How far pairs of explanations agree, a line for each pair; nothing without pairs.
void RenderAgreements(const Screen& screen,
                      const google::protobuf::RepeatedPtrField<v1::Agreement>& agreements,
                      std::ostream& out);

}  // namespace mambascope::cli
