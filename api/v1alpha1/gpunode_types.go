package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// GPUNode is what the GPUs of one node are: it has the node's name.
//
// The status is bounded: for a node of 16 GPUs with 10 slots each, all held by pods
// with names of ordinary length, it takes less than 128 KiB, and never more than
// etcd stores.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,shortName=gn,categories=ashlar
// +kubebuilder:subresource:status
// +kubebuilder:printcolumn:name="GPUs",type=integer,JSONPath=`.status.summary.gpus`,description="Physical GPUs of the node"
// +kubebuilder:printcolumn:name="Free",type=integer,JSONPath=`.status.summary.free`,description="Healthy GPUs of which nobody holds anything"
// +kubebuilder:printcolumn:name="Unhealthy",type=integer,JSONPath=`.status.summary.unhealthy`,description="GPUs on which no work is put"
// +kubebuilder:printcolumn:name="Sharing",type=string,JSONPath=`.status.summary.sharing`,description="How GPUs are shared"
// +kubebuilder:printcolumn:name="MIG",type=string,JSONPath=`.status.summary.mig`,description="MIG devices by profile"
// +kubebuilder:printcolumn:name="Product",type=string,JSONPath=`.status.summary.product`,priority=1,description="Models of the GPUs"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type GPUNode struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +optional
	Spec GPUNodeSpec `json:"spec,omitempty"`
	// +optional
	Status GPUNodeStatus `json:"status,omitempty"`
}

// GPUNodeList is a list of GPUNodes.
//
// +kubebuilder:object:root=true
type GPUNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []GPUNode `json:"items"`
}

// GPUNodeSpec is what is wanted of a node's GPUs.
type GPUNodeSpec struct {
	// MIG is how GPUs shall be cut on demand. The agent does it where the node
	// carries the label ashlar.dev/mig.on-demand=true, and never to what somebody
	// holds: what is not here and idle goes, what is held stays.
	//
	// A GPU that is not in the list is left as it is.
	//
	// +optional
	// +listType=map
	// +listMapKey=uuid
	// +kubebuilder:validation:MaxItems=64
	MIG []GPUGeometry `json:"mig,omitempty"`
}

// GPUGeometry is how one GPU shall be cut.
type GPUGeometry struct {
	// UUID names the GPU.
	//
	// +kubebuilder:validation:Pattern=`^GPU-[0-9A-Za-z-]+$`
	UUID string `json:"uuid"`
	// Since is when this entry was last changed.
	Since metav1.Time `json:"since"`
	// Instances are the MIG devices that the GPU shall have. An empty list means
	// the GPU as a whole, with MIG mode off.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Instances []MIGInstance `json:"instances,omitempty"`
}

// MIGInstance is a MIG device by its place.
type MIGInstance struct {
	// ProfileID is the hardware id of the profile, as nvidia-smi shows it.
	//
	// +kubebuilder:validation:Minimum=0
	ProfileID int32 `json:"profileID"`
	// Profile is the profile's display name, for people.
	//
	// +kubebuilder:validation:MaxLength=32
	Profile string `json:"profile"`
	// Start and Size are the place in the GPU's memory units.
	//
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=63
	Start int32 `json:"start"`
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	Size int32 `json:"size"`
}

// GPUNodeStatus is what the agent last saw.
//
// +kubebuilder:validation:XValidation:rule="!has(self.gpus) || !has(self.summary) || self.summary.gpus == size(self.gpus)",message="summary.gpus is the number of gpus"
type GPUNodeStatus struct {
	// Summary is the rest of the status in a few words and numbers.
	//
	// +optional
	Summary GPUNodeSummary `json:"summary,omitempty"`
	// Driver is the version of the driver.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Driver string `json:"driver,omitempty"`
	// CUDA is the highest CUDA version of the driver, "major.minor".
	//
	// +optional
	// +kubebuilder:validation:MaxLength=16
	CUDA string `json:"cuda,omitempty"`
	// GPUs are in the order of their indices.
	//
	// +optional
	// +listType=map
	// +listMapKey=uuid
	// +kubebuilder:validation:MaxItems=64
	GPUs []GPU `json:"gpus,omitempty"`
	// Links are the connections of which something is known, each pair once.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=2016
	Links []Link `json:"links,omitempty"`
	// Resources are what the kubelet is offered.
	//
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=256
	Resources []Resource `json:"resources,omitempty"`
	// Omitted counts what of the node did not fit into the lists, such as
	// "12 holders"; absent where all did. Whatever holds a GPU, at least one holder
	// of it is told.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=128
	Omitted string `json:"omitted,omitempty"`
	// MIGConfig is the state of the change that the label nvidia.com/mig.config
	// or the spec asks for.
	//
	// +optional
	MIGConfig *MIGConfigStatus `json:"migConfig,omitempty"`
	// Steering says how often the kubelet gave the devices that were planned.
	//
	// +optional
	Steering SteeringStatus `json:"steering,omitempty"`
	// Conditions are Ready (devices are served and holders are known) and Healthy
	// (no GPU is unhealthy).
	//
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// GPUNodeSummary is a status in a few words.
type GPUNodeSummary struct {
	// GPUs is the number of physical GPUs.
	//
	// +kubebuilder:validation:Minimum=0
	GPUs int32 `json:"gpus"`
	// Free is the number of healthy GPUs that are not cordoned and of which nobody
	// holds anything.
	//
	// +kubebuilder:validation:Minimum=0
	Free int32 `json:"free"`
	// Unhealthy is the number of GPUs on which no work is put, one with an
	// unhealthy MIG device included.
	//
	// +kubebuilder:validation:Minimum=0
	Unhealthy int32 `json:"unhealthy"`
	// Sharing says how GPUs are shared, such as "time-slicing x10" or
	// "time-slicing x10 (2 of 4 GPUs)", or "none".
	//
	// +optional
	// +kubebuilder:validation:MaxLength=128
	Sharing string `json:"sharing,omitempty"`
	// MIG counts the MIG devices by profile, the largest first, such as
	// "2x3g.20gb,7x1g.5gb", or is "empty" where MIG mode is on and there are none,
	// "off" where it is on nowhere, "-" where no GPU can do MIG.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=256
	MIG string `json:"mig,omitempty"`
	// Product counts the models, such as "8x NVIDIA A100-SXM4-40GB".
	//
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Product string `json:"product,omitempty"`
}

// GPU is one physical GPU.
type GPU struct {
	// +kubebuilder:validation:Minimum=0
	Index int32 `json:"index"`
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=96
	UUID string `json:"uuid"`
	// Product is the name that NVML reports.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=128
	Product string `json:"product,omitempty"`
	// +optional
	// +kubebuilder:validation:Minimum=0
	MemoryMiB int64 `json:"memoryMiB,omitempty"`
	// Compute is the CUDA compute capability, "major.minor".
	//
	// +optional
	// +kubebuilder:validation:MaxLength=16
	Compute string `json:"compute,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=32
	PCIBusID string `json:"pciBusID,omitempty"`
	// NUMA is the NUMA node next to the GPU, absent where it is not known.
	//
	// +optional
	NUMA *int32 `json:"numa,omitempty"`
	// PCIeRoot names the root complex.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=64
	PCIeRoot string `json:"pcieRoot,omitempty"`
	// NVSwitch names the NVSwitch domain.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=128
	NVSwitch string `json:"nvswitch,omitempty"`
	// NVLinks is the number of active NVLinks.
	//
	// +optional
	// +kubebuilder:validation:Minimum=0
	NVLinks int32 `json:"nvlinks,omitempty"`
	// MIG is absent where the product cannot be cut.
	//
	// +optional
	MIG *MIG `json:"mig,omitempty"`
	// Health is the state of the GPU and of all its views.
	Health Health `json:"health"`
	// Cordoned says that the node's annotation ashlar.dev/gpu-cordon keeps new work
	// off the GPU.
	//
	// +optional
	Cordoned bool `json:"cordoned,omitempty"`
	// Holders are the containers that hold the GPU, a slot of it or one of its MIG
	// devices, by the word of the kubelet.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=1024
	Holders []Holder `json:"holders,omitempty"`
}

// HealthState is Healthy, Unhealthy or Lost.
//
// +kubebuilder:validation:Enum=Healthy;Unhealthy;Lost
type HealthState string

// The states.
const (
	Healthy   HealthState = "Healthy"
	Unhealthy HealthState = "Unhealthy"
	Lost      HealthState = "Lost"
)

// Health is a state with its reason.
//
// +kubebuilder:validation:XValidation:rule="self.state == 'Healthy' || has(self.reason)",message="a state other than Healthy has a reason"
type Health struct {
	State HealthState `json:"state"`
	// Reason is one short phrase.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Reason string `json:"reason,omitempty"`
	// Since is when the state began, absent while healthy.
	//
	// +optional
	Since *metav1.Time `json:"since,omitempty"`
	// Action is what NVIDIA's catalogue or the driver says must be done, such as
	// "reset the GPU".
	//
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Action string `json:"action,omitempty"`
}

// MIG is how a GPU is cut.
type MIG struct {
	Enabled bool `json:"enabled"`
	// Pending is the mode after the next reset, present where it is another.
	//
	// +optional
	Pending *bool `json:"pending,omitempty"`
	// Devices are the MIG devices in the order of their indices.
	//
	// +optional
	// +listType=map
	// +listMapKey=uuid
	// +kubebuilder:validation:MaxItems=16
	Devices []MIGDevice `json:"devices,omitempty"`
	// Free are the places that are left for more MIG devices, by profile, while MIG
	// mode is on. Each is free by itself; two of them may exclude each other. It is
	// absent where it is not known how the product can be cut.
	//
	// +optional
	// +listType=map
	// +listMapKey=profileID
	// +kubebuilder:validation:MaxItems=32
	Free []MIGPlaces `json:"free,omitempty"`
}

// MIGDevice is a hardware slice.
type MIGDevice struct {
	MIGInstance `json:",inline"`
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=96
	UUID string `json:"uuid"`
	// +optional
	MemoryMiB int64 `json:"memoryMiB,omitempty"`
	// Health is present where the device is unhealthy and its GPU is not.
	//
	// +optional
	Health *Health `json:"health,omitempty"`
}

// MIGPlaces are the free places of a profile.
type MIGPlaces struct {
	// +kubebuilder:validation:Minimum=0
	ProfileID int32 `json:"profileID"`
	// +kubebuilder:validation:MaxLength=32
	Profile string `json:"profile"`
	// Starts are the places by their first memory unit.
	//
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	Starts []int32 `json:"starts"`
}

// Link is a connection of two GPUs.
type Link struct {
	// A and B are the indices of the GPUs, the lower first.
	A int32 `json:"a"`
	B int32 `json:"b"`
	// NVLinks is the number of NVLinks from the one to the other.
	//
	// +optional
	NVLinks int32 `json:"nvlinks,omitempty"`
	// PCIe is the level as `nvidia-smi topo -m` names it, absent where it is not
	// known.
	//
	// +optional
	// +kubebuilder:validation:Enum=SYS;NODE;PHB;PXB;PIX;INTERNAL
	PCIe string `json:"pcie,omitempty"`
}

// Holder is a container that holds a device.
type Holder struct {
	// Resource is the name under which it asked for it.
	//
	// +kubebuilder:validation:MaxLength=317
	Resource string `json:"resource"`
	// Device is the kubelet's id: a UUID, for a slot with "::" and its number.
	//
	// +kubebuilder:validation:MaxLength=112
	Device string `json:"device"`
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`
	// +kubebuilder:validation:MaxLength=253
	Pod string `json:"pod"`
	// +kubebuilder:validation:MaxLength=63
	Container string `json:"container"`
}

// Resource is an extended resource that the node offers.
type Resource struct {
	// +kubebuilder:validation:MaxLength=317
	Name string `json:"name"`
	// Strategy is how its devices are shared: none, time-slicing or mps.
	//
	// +kubebuilder:validation:MaxLength=32
	Strategy string `json:"strategy"`
	// Replicas is the number of slots of each GPU or MIG device, 1 where it is not
	// shared.
	//
	// +kubebuilder:validation:Minimum=1
	Replicas int32 `json:"replicas"`
	// Devices is the number of all devices, Offered of those that are healthy and
	// may be given now or are held.
	//
	// +kubebuilder:validation:Minimum=0
	Devices int32 `json:"devices"`
	// +kubebuilder:validation:Minimum=0
	Offered int32 `json:"offered"`
	// GPUs are the indices of the GPUs behind it.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	GPUs []int32 `json:"gpus,omitempty"`
	// Exclusive says that it is the second, unshared view of shared GPUs.
	//
	// +optional
	Exclusive bool `json:"exclusive,omitempty"`
}

// MIGConfigState is the state of a change of MIG devices. The values are those
// of the label nvidia.com/mig.config.state.
//
// +kubebuilder:validation:Enum=pending;success;failed
type MIGConfigState string

// The states.
const (
	MIGPending MIGConfigState = "pending"
	MIGSuccess MIGConfigState = "success"
	MIGFailed  MIGConfigState = "failed"
)

// MIGConfigStatus is the state of a change of MIG devices.
type MIGConfigStatus struct {
	// Config is the name that the label has.
	//
	// +kubebuilder:validation:MaxLength=63
	Config string         `json:"config"`
	State  MIGConfigState `json:"state"`
	// Reason says what is waited for, or why it failed and when it is tried again.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Reason string `json:"reason,omitempty"`
	// Since is when the state began.
	Since metav1.Time `json:"since"`
}

// SteeringStatus counts what became of planned devices since the agent started.
type SteeringStatus struct {
	// Matched is the number of containers that got the devices of their plan.
	//
	// +optional
	Matched int64 `json:"matched,omitempty"`
	// Swapped is the number of those that got the devices of an equal plan of
	// another pod.
	//
	// +optional
	Swapped int64 `json:"swapped,omitempty"`
	// Mismatched is the number of those that got others.
	//
	// +optional
	Mismatched int64 `json:"mismatched,omitempty"`
	// Last are the latest mismatches, the newest first.
	//
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=10
	Last []Mismatch `json:"last,omitempty"`
}

// Mismatch is a container that got other devices than planned.
type Mismatch struct {
	Time metav1.Time `json:"time"`
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`
	// +kubebuilder:validation:MaxLength=253
	Pod string `json:"pod"`
	// +kubebuilder:validation:MaxLength=63
	Container string `json:"container"`
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=256
	Planned []string `json:"planned"`
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=256
	Got []string `json:"got"`
}

// Types of the conditions.
const (
	// ConditionReady: devices are served, and who holds them is known.
	ConditionReady = "Ready"
	// ConditionHealthy: no GPU is unhealthy.
	ConditionHealthy = "Healthy"
	// NodeGPUHealthy is the condition on the Node object that says the same as
	// ConditionHealthy.
	NodeGPUHealthy corev1.NodeConditionType = "GPUHealthy"
)

// Labels and annotations. On a node:
const (
	// LabelMIGOnDemand lets the controller cut the node's idle GPUs, if "true".
	LabelMIGOnDemand = "ashlar.dev/mig.on-demand"
	// AnnotationCordon lists GPUs that get no new work, by UUID or index,
	// separated by commas.
	AnnotationCordon = "ashlar.dev/gpu-cordon"
	// AnnotationHealthOverride lists GPUs, in the same way, whose reported errors
	// count for nothing as long as they are named. A GPU that does not answer or
	// fails its probe stays unhealthy all the same.
	AnnotationHealthOverride = "ashlar.dev/gpu-health-override"
	// AnnotationMIGReason says why the label nvidia.com/mig.config.state is what it
	// is.
	AnnotationMIGReason = "ashlar.dev/mig.config.reason"
)

// AnnotationDevices is the plan of a pod: which devices each of its containers
// shall get. Its format is in package internal/kube.
const AnnotationDevices = "ashlar.dev/devices"
